"""`io_callback` for all of xtrax, checked once against the jax that is installed.

`jax.experimental.io_callback` is not covered by JAX's compatibility promise. Whatever issues a host callback imports it
from here, so that a jax whose `io_callback` differs fails at import, in one place, with a message that says so.

Source: https://docs.jax.dev/en/latest/_autosummary/jax.experimental.io_callback.html
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import io_callback

__all__ = ["MIN_JAX", "UNSUPPORTED_JAX", "IoCallbackSignatureError", "check_io_callback", "io_callback"]

MIN_JAX = (0, 10, 2)
"""The oldest jax that is supported, as a version tuple."""

UNSUPPORTED_JAX = (0, 13)
"""The first jax that is not supported, as a version tuple."""

_KNOWN_PARAMETERS = (
    ("callback", inspect.Parameter.POSITIONAL_OR_KEYWORD),
    ("result_shape_dtypes", inspect.Parameter.POSITIONAL_OR_KEYWORD),
    ("args", inspect.Parameter.VAR_POSITIONAL),
    ("sharding", inspect.Parameter.KEYWORD_ONLY),
    ("ordered", inspect.Parameter.KEYWORD_ONLY),
    ("kwargs", inspect.Parameter.VAR_KEYWORD),
)


class IoCallbackSignatureError(ImportError):
    """The installed jax is outside the supported range, or its `io_callback` is not the known one."""


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def check_io_callback(version: tuple[int, ...], function: Callable[..., Any]) -> None:
    """Refuse a jax whose `io_callback` xtrax has not been tested with.

    Args:
        version: The version of jax, as in `jax.__version_info__`.
        function: Its `io_callback`.

    Raises:
        IoCallbackSignatureError: If the version is outside `[MIN_JAX, UNSUPPORTED_JAX)` or the parameters of
            `function` differ in name, kind or order from the known ones, or `sharding` and `ordered` have no defaults.
    """
    supported = f"jax>={_dotted(MIN_JAX)},<{_dotted(UNSUPPORTED_JAX)}"
    if not MIN_JAX <= version < UNSUPPORTED_JAX:
        raise IoCallbackSignatureError(
            f"xtrax.stages supports {supported}, and found jax {_dotted(version)}; install a jax in that range, "
            "or an xtrax-stages that supports this one"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise IoCallbackSignatureError(
            f"the signature of jax {_dotted(version)}'s io_callback cannot be read ({error}); xtrax.stages supports "
            f"{supported} as released"
        ) from error
    found = tuple((p.name, p.kind) for p in parameters)
    undefaulted = [p.name for p in parameters if p.name in ("sharding", "ordered") and p.default is p.empty]
    if found != _KNOWN_PARAMETERS or undefaulted:
        raise IoCallbackSignatureError(
            f"jax {_dotted(version)}'s io_callback has the parameters ({', '.join(p.name for p in parameters)}), and "
            f"xtrax.stages knows ({', '.join(name for name, _ in _KNOWN_PARAMETERS)}), the last but one two by keyword "
            f"and with defaults; it supports {supported} as released, so install one of those"
        )


check_io_callback(jax.__version_info__, io_callback)
