"""A budget of memory."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

from xtrax.tiling._check import check_bool, check_callable, check_int, check_names
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling._planner.compiled_budget import CompiledEstimate
from xtrax.tiling.estimators import device_memory_budget


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """How much memory a whole plan may take, and how to tell how much it takes.

    Args:
        bytes: the most that the plan may take, at least 1.
        estimate: `decisions -> bytes`, the memory of a plan with these decisions, a tuple of `AxisDecision` in the
            order of the specs. What it raises reaches the caller of `BatchPlanner.plan`. If it has an attribute
            `compiles`, the number of programs that it compiled so far, the plan tells how many there were.
        solve: whether a demoted axis gets the largest chunk for which the plan fits, which takes a few estimates, and
            not its `default_batch_size`: for all axes, for none, or for those whose names are given.

    Raises:
        TypeError: `bytes` is not an integer (a bool is none), `estimate` is not callable, or `solve` is neither a bool
            nor a collection of names.
        ValueError: `bytes` is below 1.

    >>> budget = MemoryBudget(10_000, lambda decisions: 100 * decisions[0].batch_size)
    >>> budget.bytes
    10000
    """

    bytes: int
    estimate: Callable[[tuple[AxisDecision, ...]], float]
    solve: bool | Collection[str] = False

    def __post_init__(self) -> None:
        """Check all, and store names as a frozen set."""
        object.__setattr__(self, "bytes", check_int("bytes", self.bytes, 1))
        check_callable("estimate", self.estimate, "decisions -> bytes")
        if not isinstance(self.solve, bool):
            if self.solve is None:
                raise TypeError("solve must be True, False or a set of axis names, but is None.")
            object.__setattr__(self, "solve", check_names("solve", self.solve))

    def solves(self, name: str) -> bool:
        """Whether the chunk of this axis is chosen by the estimate, once it is demoted."""
        return self.solve if isinstance(self.solve, bool) else name in self.solve

    @classmethod
    def for_function(
        cls,
        fn: Callable[..., Any],
        *abstract_args: Any,
        axes: Sequence[Sequence[str] | None] | None = None,
        bytes: int | Literal["device"] = "device",
        batched: bool = False,
    ) -> "MemoryBudget":
        """A budget by the compiler's account of the program that runs `fn`, compiled at the chunk sizes in question.

        What counts is all that the program needs at once: arguments, arrays that `fn` holds or closes over, outputs
        and temporaries. Only the temporaries move with the chunks, so a budget below the rest cannot be met. A demoted
        axis gets the largest chunk that fits (`solve=True`): two compiles, with 16 and 128 elements at once, give the
        line that memory follows, and one more confirms the size that it leads to. Nothing is run.

        The account is XLA's assignment of buffers. What a library that the program calls allocates by itself is not in
        it: on CPUs, jax 0.10 runs chains of matrix products in such a library, with memory of their own.

        Args:
            fn: a function of one element, estimated as `execute_plan` runs it; with `batched`, of a batch whose
                elements are independent, estimated as `tiled_apply` runs it, along one axis.
            *abstract_args: its arguments as they are run, with all elements of every axis: pytrees of arrays or
                `jax.ShapeDtypeStruct`.
            axes: for each argument the names of its leading axes, outermost first, or None if it has none, as of
                `execute_plan`; None where every argument has the one axis that is planned.
            bytes: the most that the plan may take, or `"device"` for `device_memory_budget()`.
            batched: whether `fn` takes a batch.

        Returns:
            A budget for `BatchPlanner`. It keeps what it compiled, so planning again compiles nothing again.

        Raises:
            TypeError: `fn` is not callable, a leaf has no shape and dtype, or an argument of the wrong type.
            ValueError: no arguments, `bytes` below 1 or another text than "device", or another number of entries in
                `axes` than of arguments. When it is planned: names that are not those of the specs, sizes that
                are not the cardinalities of the specs, a `Bucket` axis, or several axes of a batched function.
            RuntimeError: the memory of the device is not known.

        >>> import jax
        >>> from xtrax.tiling import AxisSpec, BatchPlanner, MemoryBudget
        >>> xs = jax.ShapeDtypeStruct((100_000, 32), "float32")
        >>> pairs = lambda x: (x[:, None] * x[None, :]).sum(0).cumsum()
        >>> budget = MemoryBudget.for_function(pairs, xs, bytes=30_000_000)
        >>> plan = BatchPlanner(budget=budget).plan([AxisSpec("batch", 100_000, 32)])
        >>> plan.memory.fits, plan.memory.compiles <= 4
        (True, True)
        """
        check_callable("fn", fn, "one element of each argument" if not batched else "a batch of each argument")
        check_bool("batched", batched)
        if not abstract_args:
            raise ValueError("for_function needs the arguments of fn, with all elements, but got none.")
        if isinstance(bytes, str):
            if bytes != "device":
                raise ValueError(f'bytes must be a number or "device", but is {bytes!r}; 2 GB is 2 * 10**9.')
            bytes = device_memory_budget()
        limit = check_int("bytes", bytes, 1)
        return cls(limit, CompiledEstimate(fn, abstract_args, axes, batched), solve=True)
