"""What is known about an axis."""

import enum


class AxisRole(enum.Enum):
    """Whether the elements of an axis are known to be independent of one another.

    `KNOWN` axes are planned by their sizes. An `UNKNOWN` one, such as an axis read off a function's signature, is
    refused by the planner until a `CarrySpec`, a `DedupSpec` or `@axis_config` says what it is.

    >>> AxisRole.KNOWN
    <AxisRole.KNOWN: 'known'>
    """

    KNOWN = "known"
    UNKNOWN = "unknown"
