"""The entry point: parse, dispatch, and turn errors into a line and an exit code."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from xtrax.cli._defaults import INTERRUPTED, OUTPUT_CLOSED, TERMINATED
from xtrax.cli._errors import CLIError, UsageError
from xtrax.cli._interrupt import Noted, leave_at_once_on_interrupt, noted_interrupts, raise_if_interrupted
from xtrax.cli._version import __version__


def main(
    argv: Sequence[str] | None = None,
    *,
    registry: Mapping[str, tuple[type, Callable[[Any], int]]] | None = None,
    prog: str = "xtrax",
) -> int:
    """Run a command line.

    Args:
        argv: The arguments without the program's name; those of the process if None.
        registry: The verbs; `REGISTRY` if None. Another program may add its own.
        prog: The program's name, for help and errors.

    Returns:
        The exit code: 0; 1 for a run that failed; 2 for a fault of usage or configuration; 75 for a run that SIGTERM or
        SIGUSR1 stopped, saved; 130 if interrupted; 141 if the program that read the output has ended; 143 if SIGTERM
        came before there was anything to save.

    Examples:
        >>> main(["--version"]).__int__()  # doctest: +ELLIPSIS
        xtrax 0...
        0
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        with noted_interrupts() as noted:
            return _run(arguments, registry, prog, noted, debug=debug)
    except KeyboardInterrupt:  # pressed again, while the first one was told
        return INTERRUPTED
    finally:
        if argv is None:  # the process is this command's
            leave_at_once_on_interrupt()


def _run(
    arguments: list[str],
    registry: Mapping[str, tuple[type, Callable[[Any], int]]] | None,
    prog: str,
    noted: Noted,
    *,
    debug: bool,
) -> int:
    try:
        code = _dispatch(arguments, registry, prog)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # What is still buffered would raise again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OUTPUT_CLOSED
    except (Exception, KeyboardInterrupt) as error:
        # Extension modules that an interrupt hits while they are imported raise errors of their own.
        interrupted = isinstance(error, KeyboardInterrupt) or noted.signal is not None
        if not interrupted and not isinstance(error, CLIError):
            raise
        if debug:
            import traceback  # here, for a quick start

            traceback.print_exc()
        print(f"{prog}: {'interrupted' if interrupted else error}", file=sys.stderr)  # noqa: T201
        if isinstance(error, CLIError) and not interrupted:
            return error.exit_code
        return TERMINATED if noted.signal == signal.SIGTERM else INTERRUPTED


def _dispatch(arguments: list[str], registry: Mapping[str, tuple[type, Callable[[Any], int]]] | None, prog: str) -> int:
    if arguments == ["--version"]:
        print(f"{prog} {__version__}")  # noqa: T201
        return 0
    from xtrax.cli._parse import parse  # here, since it imports tyro
    from xtrax.cli.registry import REGISTRY

    verbs = REGISTRY if registry is None else registry
    if not arguments:
        raise UsageError(f"name a verb: {', '.join(verbs)}; {prog} --help tells what they do")
    parsed = parse(arguments, verbs, prog)
    if parsed is None:
        return 0
    raise_if_interrupted()
    verb, args = parsed
    return verbs[verb][1](args)
