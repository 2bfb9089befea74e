"""`module:symbol` to an object, with errors that tell what is wrong."""

import difflib
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from xtrax.cli._errors import CLIImportError, tell

_FORM = re.compile(r"(?P<module>[^\W\d]\w*(?:\.[^\W\d]\w*)*):(?P<symbol>[^\W\d]\w*(?:\.[^\W\d]\w*)*)")


def load_fn(path: str, *, import_paths: Iterable[str | os.PathLike[str]] = ()) -> Callable[..., Any]:
    """Import the callable that `module.path:symbol` names.

    Importing runs the module's code: a path is to be trusted as a script is.

    Args:
        path: The module and, after a colon, a function or class in it, dotted for nested ones.
        import_paths: Folders put in front of `sys.path`, where they stay, since what is loaded may import more later.
            The current directory comes after them.

    Returns:
        The callable.

    Raises:
        TypeError: If `path` is not a string.
        CLIImportError: If the form is wrong, the module does not exist, importing it raised an error (told with the
            last frame of its traceback), it lacks the symbol (near names are told), or the symbol is not callable.

    Examples:
        >>> load_fn("math:sqrt")(9.0)
        3.0
        >>> load_fn("math:sqrtt")
        Traceback (most recent call last):
            ...
        xtrax.cli._errors.CLIImportError: math has no 'sqrtt'; did you mean math:sqrt?
    """
    if not isinstance(path, str):
        raise TypeError(f"path must be a string such as 'optax:adam', got {path!r}")
    form = _FORM.fullmatch(path)
    if form is None:
        raise CLIImportError(f"{path!r} is not of the form module:symbol{_with_colon(path)}")
    add_import_paths([*import_paths, Path.cwd()])
    module_name, symbol = form["module"], form["symbol"]
    found = _import(module_name)
    for part in symbol.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            hint = near(part, [name for name in dir(found) if not name.startswith("_")], f"{module_name}:")
            raise CLIImportError(f"{module_name} has no {symbol!r}{hint}") from error
    if not callable(found):
        raise CLIImportError(f"{path} is not callable: it is of type {type(found).__name__}; name a function or class")
    return found


def add_import_paths(folders: Iterable[str | os.PathLike[str]]) -> None:
    """Put folders in front of `sys.path`, in this order, unless they are there."""
    new = [os.fspath(folder) for folder in folders]
    sys.path[:0] = [folder for folder in dict.fromkeys(new) if folder not in sys.path]
    importlib.invalidate_caches()


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise CLIImportError(f"importing {name} failed: {tell(error)}") from error
        parent, _, leaf = error.name.rpartition(".")
        if parent and not hasattr(sys.modules.get(parent), "__path__"):
            raise CLIImportError(f"{parent} is a module, not a package: it holds no module {leaf!r}") from error
        siblings = getattr(sys.modules.get(parent), "__path__", None) if parent else sys.path
        known = {module.name for module in pkgutil.iter_modules(siblings)} | (
            set() if parent else sys.stdlib_module_names
        )
        hint = near(leaf, known, f"{parent}." if parent else "")
        searched = "" if hint else f"; looked in {', '.join(sys.path[:2])}, ... and the installed packages"
        raise CLIImportError(f"there is no module {error.name!r}{hint}{searched}") from error
    except BaseException as error:  # a module may raise anything
        if isinstance(error, KeyboardInterrupt):
            raise
        raise CLIImportError(f"importing {name} failed: {tell(error)}") from error


def near(name: str, known: Iterable[str], prefix: str) -> str:
    """`; did you mean X?` for the known name nearest to a misspelt one; empty if none is near."""
    found = difflib.get_close_matches(name, sorted(known), 1)
    return f"; did you mean {prefix}{found[0]}?" if found else ""


def _with_colon(path: str) -> str:
    """What was probably meant by a path without a colon."""
    module, _, symbol = path.rpartition(".")
    meant = f"{module}:{symbol}"
    return f"; did you mean {meant}?" if _FORM.fullmatch(meant) else ", such as optax:adam"
