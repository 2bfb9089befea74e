"""What a layer above attaches to an axis of a plan: `AxisHook`.

`xtrax.tiling.execute._run_plan(fn, plan, args, axes, mesh, key, hooks)` runs a plan with one hook for each axis that
has something at its edge. At an axis, for each element, `emit` comes first; what it returns is the element from then
on. Then the axis yields, with `values` the stack of these elements:

- `fuse.finalize(state)`, if `fuse` is a `Reducer`: it is streamed, chunk by chunk, and no stack is made;
- `fuse(values)`, if `fuse` is another callable;
- None, if `keeps` is False: the elements have left, and are never stacked;
- `values` otherwise.

At a Scan axis an element is the `out` of the transition, whether or not the outputs are collected; carries are never
seen. `fuse` is a function of one axis: it is mapped over the lanes of the axes outside.

**`emit(values, index, mask) -> (values, token)`** gets the elements that are computed at once as rows, and is never
under a `jax.vmap` of the executor, so that ordered callbacks may be bound in it:

- `values`: leaves `(rows, ...)`. A row for each lane: the elements of a Vmap axis, of one chunk of a SafeMap axis, or
  of a DedupGather axis (its `n` original positions), of this axis and of those outside it, in row-major order, the
  outermost axis slowest. Scan axes have no lanes, and neither has a SafeMap(1) axis with something inside that has
  effects. The order of calls is then that of a Python nest in which Scan axes and the chunks of a SafeMap axis are
  loops, and the lanes form the innermost loop.
- `index`: `(rows, d)` int32, each row's index in the d plan axes down to this one, in plan order, the outermost first.
- `mask`: `(rows,)` bool, False where a row is only padding, or None if all are real. There is padding only with a mesh
  whose size does not divide the outermost axis, and in the last batch of a bucket. Where there is no mask, each element
  of the axis reaches `emit` exactly once.

It returns the values, of the same types, and a token: an integer scalar that depends on the callback, or None if the
values do already. JAX drops the effects of a scan that is differentiated unless something that they return reaches the
carry or the outputs, so the executor threads the tokens through every loop, and ties their sum to the results. `emit`
should give its callback `lax.stop_gradient` of the values.

**Programs are cached** by the hooks, so hooks of equal effect should be equal: `emit` and `fuse` hashable, and compared
by what they do, such as a frozen dataclass with a `__call__`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from xtrax.tiling.reducers import Reducer


@dataclasses.dataclass(frozen=True)
class AxisHook:
    """What happens at the edge of one axis; see the module's docstring.

    Args:
        emit: `(values, index, mask) -> (values, token)`, side effects of the rows computed at once; None for none.
        fuse: a `Reducer`, streamed, or a function of the stack; None for neither.
        keeps: whether the axis yields the stack where there is no `fuse`.
    """

    emit: Callable[[Any, Any, Any], tuple[Any, Any]] | None = None
    fuse: Callable[[Any], Any] | Reducer | None = None
    keeps: bool = True

    @property
    def streamed(self) -> Reducer | None:
        """The reducer, if `fuse` is one."""
        return self.fuse if isinstance(self.fuse, Reducer) else None

    @property
    def stacks(self) -> bool:
        """Whether the elements of the axis are stacked."""
        return self.streamed is None and (self.fuse is not None or self.keeps)


NO_HOOK = AxisHook()
