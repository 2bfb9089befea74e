"""What executors raise."""


class ExecutorError(ValueError):
    """An axis cannot be run with this strategy, boundary or data; the message says what to change."""
