"""A result to standard output or to a file that is there whole or not at all."""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from xtrax.cli._errors import CLIError


def write(content: str | bytes, out: Path | None) -> None:
    """Write a result.

    Args:
        content: Text, or bytes, which need a file.
        out: The file; standard output if None.

    Raises:
        CLIError: If the file cannot be written; what was there before stays.
    """
    if out is None:
        assert isinstance(content, str)
        sys.stdout.write(content if content.endswith("\n") else f"{content}\n")
        return
    data = content.encode() if isinstance(content, str) else content
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".tmp")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(temporary, 0o666 & ~mask)  # mkstemp makes it private
        os.replace(temporary, out)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        why = error.strerror or str(error)
        raise CLIError(f"cannot write {out}: {why}; name a file in a folder that can be written") from error
