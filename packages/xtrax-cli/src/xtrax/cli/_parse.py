"""Command lines to the arguments of a verb, by tyro."""

import contextlib
import difflib
import functools
import inspect
import io
import itertools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import tyro

from xtrax.cli._errors import UsageError

_RULE = r"[─-]{10,}"
_DESCRIPTION = (
    "Look at plans, train from TOML, sweep, and export. "
    "--version tells the version; --debug, anywhere, shows the traceback of an error."
)


def parse(
    arguments: list[str], verbs: Mapping[str, tuple[type, Callable[[Any], int]]], prog: str
) -> tuple[str, Any] | None:
    """The verb and its arguments object, or None if only help or a completion script was asked for."""
    first, *rest = arguments
    if first in verbs:
        # The parsers of the other verbs, which cost half of the time to start, are not made.
        args_class = verbs[first][0]
        args = _quiet(lambda: tyro.cli(args_class, prog=f"{prog} {first}", args=rest), f"{prog} {first}")
        return None if args is None else (first, args)
    if not first.startswith("-"):
        near = difflib.get_close_matches(first, verbs, 1)
        hint = f"did you mean {prog} {near[0]}?" if near else f"there are {', '.join(verbs)}"
        raise UsageError(f"there is no verb {first!r}; {hint}")
    # A type that is made at run time, which no type checker can follow.
    kinds: list[Any] = []
    for name, (args_class, _) in verbs.items():
        summary = (inspect.getdoc(args_class) or "").partition("\n\n")[0]
        verb = tyro.conf.subcommand(name, prefix_name=False, description=summary)
        kinds.append(Annotated[args_class, verb])  # ty: ignore[invalid-type-form]
    any_verb: Any = functools.reduce(operator.or_, kinds)
    args = _quiet(lambda: tyro.cli(any_verb, prog=prog, args=arguments, description=_DESCRIPTION), prog)
    if args is None:
        return None
    return next(name for name, (args_class, _) in verbs.items() if type(args) is args_class), args


def _quiet(parse_them: Callable[[], Any], prog: str) -> Any:
    """What tyro returns, None if it printed what was asked for, or its error in one line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            return parse_them()
    except SystemExit as error:
        if not error.code:
            return None
        raise UsageError(f"{_own_words(_condensed(told.getvalue()), prog)}; see {prog} --help") from error


_WORDS = (
    (r"The following arguments are required: (?P<names>.*)", "{prog} needs {names}"),
    (
        r"Error parsing (?P<name>\S+): no type matching .*\bINT .*\['(?P<found>.*)'\]",
        "{name} must be an integer, found '{found}'",
    ),
    (
        r"Error parsing (?P<name>\S+): invalid literal for int.*: '(?P<found>.*)'",
        "{name} must be an integer, found '{found}'",
    ),
    (
        r"invalid choice '(?P<found>.*)' for argument '(?P<name>\S+)'\. Expected one of \((?P<names>.*)\)",
        "{name} must be one of {names}, found '{found}'",
    ),
    (r"Missing value for argument '(?:\(')?(?P<name>-[\w-]+).*", "{name} needs a value"),
    (r"Unrecognized options: (?P<names>.*)", "{prog} does not take {names}"),
)


def _own_words(text: str, prog: str) -> str:
    """What tyro says, as xtrax says such things; what it says of anything else, as it is."""
    for pattern, words in _WORDS:
        if match := re.fullmatch(pattern, text):
            return words.format(prog=prog, **match.groupdict())
    return text


def _condensed(box: str) -> str:
    """What is said in the box that tyro draws around an error, as one line: without its title, rules and advice."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()[1:]
    if missing := _missing(lines):
        return f"The following arguments are required: {', '.join(missing)}"
    text = " ".join(line.strip("│| ") for line in lines if not line.startswith(("╰", "+-")))
    parts = [part.strip() for part in re.split(_RULE, text)]
    wanted = [part for part in parts if not re.search(r"full helptext|Argument helptext", part)]
    return "; ".join(re.split(r"\s*Got errors:", part)[0].rstrip(". ") for part in wanted if part) or "cannot be parsed"


def _missing(lines: list[str]) -> list[str]:
    """The arguments that newer versions of tyro list, each with its help, under "Missing from"."""
    for number, line in enumerate(lines):
        at = line.find("Missing from")
        if at < 0:
            continue
        listed = itertools.takewhile(lambda line: not re.search(_RULE, line), lines[number + 1 :])
        # An argument stands four blanks in, and its help deeper.
        return [rest.split()[0] for line in listed if (rest := line[at:].removeprefix("    "))[:1].strip()]
    return []
