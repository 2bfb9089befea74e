"""The memory of a plan by the compiler's account of the program that runs it."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from xtrax.tiling._axes import resolve_axes
from xtrax.tiling._execute.args import check_axes, check_axes_form, check_sizes
from xtrax.tiling._map.chunked import map_chunks
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._plan.batch_plan import BatchPlan
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling._programs import Program, as_abstract, compiled_bytes
from xtrax.tiling.execute import execute_plan
from xtrax.tiling.strategy import Bucket, DedupGather, SafeMap, Vmap


class CompiledEstimate:
    """`decisions -> bytes`: arguments, outputs and temporaries of the program that runs a function by them.

    Args:
        fn: a function of one element, or with `batched` of a batch.
        args: its arguments as they are run, with all elements.
        axes: as of `execute_plan`.
        batched: whether `fn` takes a batch.

    Raises:
        TypeError: a leaf of `args` has no shape and dtype, or `axes` is of the wrong kind.
        ValueError: `axes` has another number of entries than there are arguments, or an entry names an axis twice.
    """

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any], axes: Any = None, batched: bool = False) -> None:
        """Keep the shapes of the arguments; nothing is traced yet."""
        self.fn = fn
        self.args = as_abstract(args)
        self.axes = None if axes is None else check_axes_form(axes, self.args)
        self.batched = batched
        self.known: dict[Hashable, int] = {}

    @property
    def compiles(self) -> int:
        """How many programs were compiled."""
        return len(self.known)

    def __call__(self, decisions: tuple[AxisDecision, ...]) -> int:
        """Bytes of the plan with these decisions, compiled once for those that lead to one program."""
        key = tuple(_signature(decision) for decision in decisions)
        if key not in self.known:
            for decision in decisions:
                if isinstance(decision.strategy, Bucket):
                    raise ValueError(
                        f"axis {decision.spec.name!r} is a Bucket, whose batches are made up on the host, one program "
                        "for each boundary; plan the other axes under the budget, with arguments of the largest one."
                    )
            run = self._batched(decisions) if self.batched else self._of_elements(decisions)
            self.known[key] = compiled_bytes(Program.of(run, self.args).compile())
        return self.known[key]

    def _of_elements(self, decisions: tuple[AxisDecision, ...]) -> Callable[..., Any]:
        plan = BatchPlan(decisions)
        return lambda *args: execute_plan(self.fn, plan, *args, axes=self.axes)

    def _batched(self, decisions: tuple[AxisDecision, ...]) -> Callable[..., Any]:
        if len(decisions) != 1 or not isinstance(decisions[0].strategy, (Vmap, SafeMap)):
            found = ", ".join(f"{d.spec.name!r}: {type(d.strategy).__name__}" for d in decisions) or "none"
            raise ValueError(
                f"a function of a batch is run along one axis, all at once or in chunks, but the plan has {found}; "
                "pass a function of one element, and batched=False."
            )
        names = check_axes(decisions, self.args, self.axes)
        check_sizes(decisions, self.args, names)
        chunks = Chunks.balanced(decisions[0].spec.cardinality, max(decisions[0].batch_size, 1))

        def run(*args: Any) -> Any:
            axes = resolve_axes(args, tuple(0 if entry else None for entry in names))
            return map_chunks(axes.of_mapped(lambda xs: self.fn(*xs)), axes.mapped, axes.mapped_axes, chunks)

        return run


def _signature(decision: AxisDecision) -> Hashable:
    """Equal for decisions that lead to one program: chunks are told apart by how they come out."""
    strategy, spec = decision.strategy, decision.spec
    if isinstance(strategy, SafeMap):
        return spec.name, spec.cardinality, Chunks.balanced(spec.cardinality, strategy.batch_size).size
    if isinstance(strategy, Vmap):
        return spec.name, spec.cardinality, spec.cardinality
    if isinstance(strategy, DedupGather):
        size = Chunks.balanced(strategy.k_bucket, strategy.at_once).size
        return spec.name, spec.cardinality, dataclasses.replace(strategy, batch_size=size)
    return spec.name, spec.cardinality, strategy
