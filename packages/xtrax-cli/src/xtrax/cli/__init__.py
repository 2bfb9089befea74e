"""The `xtrax` command, and its pieces for other command lines.

Importing this package imports neither tyro nor jax; names that need them are resolved when they are first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from xtrax.cli._errors import CLIError, CLIImportError, ShapeParseError
from xtrax.cli._main import main
from xtrax.cli._version import __version__

if TYPE_CHECKING:
    from xtrax.cli._imports import load_fn
    from xtrax.cli._load_run import LoadedRun, load_run
    from xtrax.cli.registry import REGISTRY

_LAZY = {
    "LoadedRun": "xtrax.cli._load_run",
    "REGISTRY": "xtrax.cli.registry",
    "load_fn": "xtrax.cli._imports",
    "load_run": "xtrax.cli._load_run",
}

__all__ = [
    "REGISTRY",
    "CLIError",
    "CLIImportError",
    "LoadedRun",
    "ShapeParseError",
    "__version__",
    "load_fn",
    "load_run",
    "main",
]


def __getattr__(name: str) -> Any:
    """Import what is lazy (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    """Every public name, imported or not."""
    return sorted({*globals(), *_LAZY})
