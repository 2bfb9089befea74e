"""The version of a document's layout."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from xtrax.config._faults import Fault, check_error_class, check_mapping, describe, report


@dataclass(frozen=True)
class SchemaVersionStatus:
    """How a document's `schema_version` compares with the one that the program reads.

    Attributes:
        kind: `"ok"`; `"missing"`; `"mismatched"`, an older version or not a whole number; or
            `"newer_than_supported"`.
        found: What the document says; `None` if nothing.
        current: The version that the program reads.
    """

    kind: Literal["ok", "missing", "mismatched", "newer_than_supported"]
    found: Any
    current: int


def classify_schema_version(raw: Mapping[str, Any], current: int) -> SchemaVersionStatus:
    """Compare a document's top-level `schema_version` with the current one.

    Args:
        raw: The document.
        current: The version that the program reads, at least 1.

    Returns:
        The status; nothing is raised for a wrong document.

    Raises:
        TypeError: If `raw` is not a mapping or `current` not an integer.
        ValueError: If `current` is below 1.

    Examples:
        >>> classify_schema_version({"schema_version": 3}, 2)
        SchemaVersionStatus(kind='newer_than_supported', found=3, current=2)
        >>> classify_schema_version({}, 2).kind
        'missing'
    """
    check_mapping(raw)
    if not isinstance(current, int) or isinstance(current, bool):
        raise TypeError(f"current must be an integer, got {current!r}")
    if current < 1:
        raise ValueError(f"current must be at least 1, got {current}")
    if "schema_version" not in raw:
        return SchemaVersionStatus("missing", None, current)
    found = raw["schema_version"]
    if not isinstance(found, int) or isinstance(found, bool) or found < current:
        return SchemaVersionStatus("mismatched", found, current)
    return SchemaVersionStatus("ok" if found == current else "newer_than_supported", found, current)


def check_schema_version(raw: Mapping[str, Any], current: int, error_cls: type[Exception]) -> None:
    """Refuse a document whose `schema_version` is not the current one.

    Args:
        raw: The document.
        current: The version that the program reads, at least 1.
        error_cls: The exception class to raise; called with the message.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `current` is below 1.
        error_cls: If the version is missing, another, or newer.

    Examples:
        >>> check_schema_version({"schema_version": 1}, 1, ValueError)
        >>> check_schema_version({"schema_version": 2}, 1, ValueError)
        Traceback (most recent call last):
            ...
        ValueError: schema_version: 2 is newer than 1, the newest that this version reads; upgrade the program
    """
    check_error_class(error_cls)
    status = classify_schema_version(raw, current)
    if status.kind == "ok":
        return
    if status.kind == "missing":
        what = f"missing; write schema_version = {current} at the top of the file"
    elif status.kind == "newer_than_supported":
        what = f"{status.found} is newer than {current}, the newest that this version reads; upgrade the program"
    else:
        what = f"must be the integer {current}, found {describe(status.found)}"
    raise error_cls(report(raw, [Fault(("schema_version",), what)]))
