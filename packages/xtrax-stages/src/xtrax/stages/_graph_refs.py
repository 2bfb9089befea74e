"""References to callables: `module.path:symbol`, resolved and written."""

import difflib
import importlib
import re
from typing import Any

from xtrax.tiling.reducers import Reducer

_REFERENCE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


class GraphError(ValueError):
    """A graph, a node of it or its file is not what it must be; the message names the node or the file."""


def check_ref(ref: Any, where: str, *, or_reducer: bool = False) -> None:
    """Refuse what is neither a callable nor of the form `module.path:symbol`; nothing is imported."""
    if _usable(ref, or_reducer):
        return
    if not isinstance(ref, str):
        raise TypeError(f"{where} must be a callable or 'module.path:symbol'; found {ref!r}")
    if "<lambda>" in ref or "<locals>" in ref:
        raise GraphError(f"{where}: {ref!r} is a lambda or a closure, which cannot be imported; define it in a module")
    if not _REFERENCE.fullmatch(ref):
        raise GraphError(f"{where} must have the form 'module.path:symbol'; found {ref!r}")


def _usable(value: Any, or_reducer: bool) -> bool:
    return callable(value) or (or_reducer and isinstance(value, Reducer))


def resolve_ref(ref: Any, where: str, *, or_reducer: bool = False) -> Any:
    """The callable that a reference names; with `or_reducer` it may be a `Reducer` of `xtrax.tiling` too.

    Raises:
        GraphError: If the module is missing or fails on import, has no such symbol, or the symbol is not callable.
    """
    if _usable(ref, or_reducer):
        return ref
    check_ref(ref, where)
    module_name, _, symbol = ref.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise GraphError(
                f"{where}: {ref!r}: there is no module {error.name!r}; is its folder on sys.path?"
            ) from error
        raise GraphError(f"{where}: {ref!r}: importing {module_name!r} failed: {error}") from error
    except (Exception, SystemExit) as error:  # a script without a __main__ guard exits when it is imported
        raise GraphError(
            f"{where}: {ref!r}: importing {module_name!r} failed: {type(error).__name__}: {error}"
        ) from error
    for name in symbol.split("."):
        if not hasattr(value, name):
            near = difflib.get_close_matches(name, dir(value), n=1)
            raise GraphError(
                f"{where}: {ref!r}: {getattr(value, '__name__', value)!r} has no {name!r}"
                + (f". Did you mean {near[0]!r}?" if near else "")
            )
        value = getattr(value, name)
    if not _usable(value, or_reducer):
        raise GraphError(f"{where}: {ref!r} is not callable; found {type(value).__name__}")
    return value


def write_ref(ref: Any, where: str) -> str:
    """The `module.path:symbol` of a callable, such that resolving it gives the same object.

    Raises:
        GraphError: For a lambda, a closure, or anything else that cannot be imported.
    """
    if isinstance(ref, str):
        check_ref(ref, where)
        return ref
    module, symbol = getattr(ref, "__module__", None), getattr(ref, "__qualname__", None)
    if not module or not symbol:
        raise GraphError(
            f"{where}: a {type(ref).__name__} object has no name to import it by; assign it to a name in a module and "
            "give 'module:name'"
        )
    if "<lambda>" in symbol or "<locals>" in symbol:
        raise GraphError(f"{where}: {symbol} is a lambda or a closure, which cannot be imported; define it in a module")
    if module == "__main__":
        raise GraphError(f"{where}: {symbol} is defined in the script that runs; move it to a module to import it from")
    written = f"{module}:{symbol}"
    if resolve_ref(written, where) is not ref:
        raise GraphError(f"{where}: {written!r} names another object; give the 'module:symbol' where this one is found")
    return written
