"""Small checks of a raw document, for those who read it by hand."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from xtrax.config._faults import Fault, check_error_class, check_mapping, describe, nearest, report
from xtrax.config._keys import Key, split_key


def require_sections(raw: Mapping[str, Any], sections: Iterable[str], error_cls: type[Exception]) -> None:
    """Check that a document has these tables.

    Args:
        raw: The document.
        sections: Names of tables, dotted for nested ones (`"model.kwargs"`).
        error_cls: The exception class to raise; called with the message.

    Raises:
        TypeError: If an argument is of the wrong kind; a single `str` for `sections` is refused.
        error_cls: If a section is missing or is not a table. The message names every such one.

    Examples:
        >>> require_sections({"model": {}, "data": {}}, ["model", "data"], ValueError)
        >>> require_sections({"modle": {}}, ["model", "data"], ValueError)
        Traceback (most recent call last):
            ...
        ValueError: model: this section is missing; did you mean it by modle?
        data: this section is missing; add a [data] table
    """
    check_mapping(raw)
    check_error_class(error_cls)
    if isinstance(sections, str) or not isinstance(sections, Iterable):
        raise TypeError(f"sections must be a list of names such as ['model'], got {sections!r}")
    faults = []
    for name in sections:
        key, found, table = _look_up(raw, name, "sections")
        if not found:
            others = [other for other, value in table.items() if isinstance(value, Mapping)] if table else []
            near = nearest(str(key[-1]), set(others) - set(sections))
            hint = f"did you mean it by {near}?" if near else f"add a [{name}] table"
            faults.append(Fault(key, f"this section is missing; {hint}"))
        elif not isinstance(found[0], Mapping):
            faults.append(Fault(key, f"must be a table ([{name}]), found {describe(found[0])}"))
    if faults:
        raise error_cls(report(raw, faults))


def require_field(
    raw: Mapping[str, Any], name: str, predicate: Callable[[Any], bool], error_cls: type[Exception]
) -> Any:
    """A field that must be there and satisfy a predicate.

    Args:
        raw: The document, or a table of it.
        name: The field, dotted for nested ones (`"optimizer.kwargs.lr"`).
        predicate: Called with the value; true if it is allowed. Its docstring's first line, or its name, tells the
            user what is allowed. A predicate that raises `TypeError`, `ValueError`, `AttributeError` or
            `LookupError` has refused the value.
        error_cls: The exception class to raise; called with the message.

    Returns:
        The field's value.

    Raises:
        TypeError: If an argument is of the wrong kind. A type is not a predicate: `str(value)` is true of nearly
            everything.
        error_cls: If the field is missing or refused.

    Examples:
        >>> def is_positive(value):
        ...     "a number above 0"
        ...     return value > 0
        >>> require_field({"optimizer": {"lr": 0.1}}, "optimizer.lr", is_positive, ValueError)
        0.1
        >>> require_field({"optimizer": {"lr": -1}}, "optimizer.lr", is_positive, ValueError)
        Traceback (most recent call last):
            ...
        ValueError: optimizer.lr: must be a number above 0, found the integer -1
    """
    check_mapping(raw)
    check_error_class(error_cls)
    if isinstance(predicate, type) or not callable(predicate):
        raise TypeError(
            f"predicate must be a function of the value that returns a bool, got {predicate!r}; "
            "for a type use: lambda value: isinstance(value, TYPE)"
        )
    key, found, table = _look_up(raw, name, "name")
    if not found:
        near = nearest(str(key[-1]), table or ())
        raise error_cls(report(raw, [Fault(key, "missing; " + (f"did you mean it by {near}?" if near else "set it"))]))
    value, cause = found[0], None
    try:
        if predicate(value):
            return value
    except (TypeError, ValueError, AttributeError, LookupError) as error:
        cause = error
    raise error_cls(report(raw, [Fault(key, f"{_allowed(predicate)}, found {describe(value)}")])) from cause


def _look_up(raw: Mapping[str, Any], name: object, argument: str) -> tuple[Key, tuple[Any] | None, Mapping | None]:
    """The key's parts; its value in a 1-tuple, or None if it is missing; the table that holds it, if there is one."""
    if not isinstance(name, str):
        raise TypeError(f"{argument} must name fields by strings, got {name!r}")
    if name in raw:  # a quoted key may contain dots
        return (name,), (raw[name],), raw
    key = split_key(name)
    table: Any = raw
    for part in key[:-1]:
        table = table.get(part) if isinstance(table, Mapping) else None
    if not isinstance(table, Mapping):
        return key, None, None
    return key, (table[key[-1]],) if key[-1] in table else None, table


def _allowed(predicate: Callable[[Any], bool]) -> str:
    """What a predicate allows, by its docstring or name."""
    words = (getattr(predicate, "__doc__", None) or "").strip().splitlines()
    if words:
        return f"must be {words[0].rstrip('.')}"
    name = getattr(predicate, "__name__", "")
    return f"must satisfy {name}" if name.isidentifier() else "this value is not allowed"
