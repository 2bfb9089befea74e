"""`xtrax export`: a function as StableHLO."""

from pathlib import Path

import jax
import jax.export

from xtrax.cli._call import abstract_call
from xtrax.cli._errors import CLIError
from xtrax.cli._shapes import Shapes
from xtrax.cli._write import write


def export(fn: str, shapes: Shapes, serialized: bool, out: Path | None) -> int:
    """Write the program of a function for these shapes.

    Args:
        fn: `module:symbol`.
        shapes: The shapes of its arguments.
        serialized: Whether to write what `jax.export.deserialize` reads, rather than text.
        out: The file; standard output if None, which only text can go to.

    Returns:
        The exit code, 0.

    Raises:
        CLIError: If the function cannot be traced, or serialised, or the file not written.
    """
    call = abstract_call(fn, shapes)
    jitted = jax.jit(call.program())
    if not serialized:
        write(call.trace(lambda: jitted.lower(*call.args, **call.kwargs).as_text()), out)
        return 0
    try:
        exported = call.trace(lambda: jax.export.export(jitted)(*call.args, **call.kwargs))
    except CLIError as error:
        if isinstance(error.__cause__, NotImplementedError) and "callback" in str(error.__cause__):
            raise CLIError(
                f"{fn} calls back into Python (a Tap, a Sink, jax.debug.print, io_callback or pure_callback), which "
                "cannot be serialised; take the effects out, or export text without --serialized"
            ) from error
        raise
    import flatbuffers  # noqa: F401  jax imports it only to serialise, and so does not depend on it

    write(bytes(exported.serialize()), out)
    return 0
