"""The error for a trace too many."""

_LISTED = 20  # differences in the message; all of them are in the attribute


class TraceBudgetExceededError(AssertionError):
    """A call needed one trace more than its function's budget allows.

    It is an `AssertionError`, as `chex.assert_max_traces` raises. Nothing was run or compiled by the call, and the
    signatures that were traced before it keep working.

    Attributes:
        function: Name of the function.
        max_traces: The budget, in traces.
        resembled: Which earlier trace the differences refer to, counted from 1, or None when there was none.
        differences: One line for each thing that differs from that trace, such as
            `"batch['x']: shape (32, 7) -> (31, 7)"`. Empty when nothing visible differs.
        advice: What to do about them, a sentence each.
    """

    def __init__(
        self,
        function: str,
        max_traces: int,
        resembled: int | None = None,
        differences: tuple[str, ...] = (),
        advice: tuple[str, ...] = (),
    ) -> None:
        super().__init__(function, max_traces, resembled, differences, advice)
        self.function = function
        self.max_traces = max_traces
        self.resembled = resembled
        self.differences = differences
        self.advice = advice

    def __str__(self) -> str:
        """The message: the budget, what changed, and what to do."""
        lines = [f"{self.function}: this call needs a trace beyond the budget of max_traces={self.max_traces}."]
        if self.resembled is not None:
            lines.append(f"Changed since trace {self.resembled} of {self.max_traces}, the one it most resembles:")
            lines += [f"  {line}" for line in self.differences[:_LISTED] or ("nothing visible",)]
            if len(self.differences) > _LISTED:
                lines.append(f"  ... and {len(self.differences) - _LISTED} more")
        return "\n".join([*lines, *self.advice])


# Tracebacks print where an exception can be imported from.
TraceBudgetExceededError.__module__ = "xtrax.jit"
