"""What goes wrong on a command line, with the exit code; and other people's errors in one line."""

import os
import sysconfig
import traceback
from types import TracebackType

_INSTALLED = tuple({sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")})


class CLIError(Exception):
    """A fault of usage or configuration; its message is one or two lines that tell the fix.

    Attributes:
        exit_code: What the process exits with: 2.
    """

    exit_code = 2


class CLIImportError(CLIError):
    """A `module:symbol` that cannot be imported."""


class UsageError(CLIError):
    """A command line that cannot be parsed."""


class ShapeParseError(CLIError, ValueError):
    """Shapes that do not follow the grammar; the message shows the fault by a caret, and the grammar."""


class RunError(CLIError):
    """A run that failed after its first step; exit code 1."""

    exit_code = 1


class OutputClosed(BrokenPipeError):
    """Standard output was closed by the program that read it, such as `head`."""


def tell(error: BaseException) -> str:
    """Another's exception in one line: its type, the first line of its message, and where it came from."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else ""
    if isinstance(error, SyntaxError):
        where = f"{_shown(error.filename or '?')}:{error.lineno}"
        message = error.msg
    else:
        where = _last_frame(error.__traceback__)
    name = type(error).__name__
    return f"{name}: {message}".removesuffix(": ") + (f" ({where})" if where else "")


def _last_frame(start: TracebackType | None) -> str:
    """`file:line, in function` of the innermost frame of the user's own code; of all code if there is none."""
    last = own = None
    for frame, line in traceback.walk_tb(start):
        file, module = frame.f_code.co_filename, frame.f_globals.get("__name__", "")
        if file.startswith("<") or module.startswith("xtrax."):
            continue
        last = (file, line, frame.f_code.co_name)
        if not file.startswith(_INSTALLED):
            own = last
    found = own or last
    if found is None:
        return ""
    file, line, function = found
    return f"{_shown(file)}:{line}" + ("" if function == "<module>" else f", in {function}")


def _shown(file: str) -> str:
    """A path as short as it can be told from here."""
    relative = os.path.relpath(file)
    return file if relative.startswith("..") else relative
