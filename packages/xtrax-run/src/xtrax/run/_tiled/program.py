"""The program of a tile: a plan's nest of axes, its outermost one cut short, with no array compiled in."""

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.run._tiled.inputs import is_key
from xtrax.tiling._execute.args import bind
from xtrax.tiling._execute.axes import Axis, Nest
from xtrax.tiling._execute.effects import fires
from xtrax.tiling._execute.hooks import NO_HOOK, AxisHook
from xtrax.tiling._execute.lanes import Operand
from xtrax.tiling.carry import materialize_carry
from xtrax.tiling.execute import _run_on_device
from xtrax.tiling.plan import AxisDecision
from xtrax.tiling.reducers import Reducer
from xtrax.tiling.strategy import DedupGather, SafeMap, Scan, Vmap


class TileResult(NamedTuple):
    """What a tile's program returns.

    Attributes:
        rows: The outputs, leaves `(n, ...)`; None where they are reduced or have left.
        carries: By axis, the last carries of the Scan axes inside, leaves `(n, ...)`.
        state: What the tile after it, or the end, needs: the carry of an outermost Scan, and the state of an outermost
            Reducer over this tile alone; None without.
    """

    rows: Any
    carries: dict[str, Any]
    state: Any


@dataclasses.dataclass(frozen=True)
class Work:
    """What is computed of each tile.

    Attributes:
        fn: Of one element, or None.
        decisions: Of the plan.
        names: For each input, the axes that are its leading dimensions.
        hooks: By axis.
        mesh: The devices that a tile is split over, or None.
        key: The PRNG key, or None.
        k_bucket: How many rows of a tile are computed, if the outermost axis is a DedupGather.
    """

    fn: Callable[..., Any] | None
    decisions: tuple[AxisDecision, ...]
    names: tuple[tuple[str, ...], ...]
    hooks: Mapping[str, AxisHook]
    mesh: jax.sharding.Mesh | None
    key: Any
    k_bucket: int | None = None

    @property
    def outermost(self) -> AxisDecision:
        """The decision about the axis that is cut into tiles."""
        return self.decisions[0]

    @property
    def hook(self) -> AxisHook:
        """What happens at its edge."""
        return self.hooks.get(self.outermost.spec.name, NO_HOOK)

    @property
    def reducer(self) -> Reducer | None:
        """What reduces its outputs, if anything does."""
        return self.hook.streamed

    @property
    def scans(self) -> bool:
        """Whether it has a carry."""
        return isinstance(self.outermost.strategy, Scan)

    def first_carry(self) -> Any:
        """Before the first tile, each leaf strongly typed, as what a tile returns is; None without."""
        if not isinstance(self.outermost.strategy, Scan):
            return None
        return jax.tree.map(_strong, materialize_carry(self.outermost.strategy.init))

    def run(self, inputs: Sequence[Any], rows: int, start: Any, carry: Any, index_map: Any) -> TileResult:
        """Compute a tile, inside a trace.

        Args:
            inputs: With the rows that are computed.
            rows: Of the tile.
            start: The number of its first row, int32.
            carry: Before the tile; None without.
            index_map: `(rows,)`, for an outermost DedupGather: which of the computed rows each row equals.
        """
        outer, hooks = self.outermost, dict(self.hooks)
        name, strategy = outer.spec.name, outer.strategy
        if isinstance(strategy, DedupGather):
            self._refuse_effects(inputs)
            hooks.pop(name, None)
            distinct = Vmap() if strategy.batch_size is None else SafeMap(strategy.batch_size)
            values, carries = self._nest(inputs, self.names, distinct, self.k_bucket or rows, hooks, start)
            gather = strategy.gather_fn or (lambda ys, index: jax.tree.map(lambda y: jnp.asarray(y)[index], ys))
            values, carries = gather(values, index_map), gather(carries, index_map)
            if self.hook != NO_HOOK:
                alone = dataclasses.replace(self, fn=None, decisions=self.decisions[:1], key=None)
                edge = {name: _unfinished(self.hook)}
                values, _ = alone._nest([values], [(name,)], Vmap(), rows, edge, start)
        else:
            if isinstance(strategy, Scan):
                strategy = dataclasses.replace(strategy, init=carry)
            hooks[name] = _unfinished(self.hook)
            values, carries = self._nest(inputs, self.names, strategy, rows, hooks, start)
        carries = dict(carries)
        state = {"carry": carries.pop(name, None), "reduced": values if self.reducer else None}
        has_state = self.scans or self.reducer is not None
        return TileResult(None if self.reducer else values, carries, state if has_state else None)

    def _refuse_effects(self, inputs: Sequence[Any]) -> None:
        """Refuse side effects of `fn`, as `execute_plan` does; the distinct rows are mapped as a plain axis."""
        bound = bind(self.fn, inputs, self.names, self.key)
        operands = [Operand(jnp.asarray(array), dims) for array, dims in zip(bound.arrays, bound.dims, strict=True)]
        axes = tuple(Axis(d.spec.name, d.strategy, self.hooks.get(d.spec.name, NO_HOOK)) for d in self.decisions)
        fires(Nest(axes, lambda values: bound.call(values, None)), operands)

    def _nest(
        self, inputs: Sequence[Any], names: Any, strategy: Any, size: int, hooks: Mapping[str, AxisHook], start: Any
    ) -> tuple[Any, dict[str, Any]]:
        spec = dataclasses.replace(self.outermost.spec, cardinality=size)
        batch_size = max(self.outermost.batch_size, 1)  # an empty axis is traced with one element
        outer = dataclasses.replace(self.outermost, spec=spec, strategy=strategy, batch_size=batch_size)
        numbers = start + jnp.arange(size, dtype=jnp.int32)
        decisions = (outer, *self.decisions[1:])
        return _run_on_device(self.fn, decisions, inputs, names, self.mesh, self.key, hooks, numbers)


def _strong(leaf: Any) -> jax.Array:
    if is_key(leaf) or (isinstance(leaf, jax.Array) and not leaf.weak_type):
        return leaf
    return jnp.asarray(np.asarray(leaf))


def _unfinished(hook: AxisHook) -> AxisHook:
    """The hook, whose reducer is left as a state, to be merged with those of other tiles."""
    if hook.streamed is None:
        return hook
    return dataclasses.replace(hook, fuse=dataclasses.replace(hook.streamed, finalize=_same))


def _same(state: Any) -> Any:
    return state


@dataclasses.dataclass
class TileProgram:
    """A tile's program for one number of rows.

    Attributes:
        lowered: What is compiled, of `(consts, leaves, start, carry, index_map)`.
        consts: The arrays that the program needs for every tile: those that `fn` holds or closes over, inputs without
            the outermost axis, and the key.
        shapes: What it returns, a `TileResult` of `jax.ShapeDtypeStruct`.
    """

    lowered: Any
    consts: list[Any]
    shapes: TileResult
    _compiled: Any = None

    @classmethod
    def of(cls, work: Work, rebuild: Callable[[Sequence[Any]], Sequence[Any]], leaves: Sequence[Any], rows: int,
           carry: Any) -> "TileProgram":  # fmt: skip
        """Trace the program; nothing is computed or compiled.

        Args:
            work: What is computed.
            rebuild: The inputs, from their leaves that have the outermost axis.
            leaves: Arrays or placeholders for these, with as many rows as are computed.
            rows: Rows of the tile.
            carry: Before the tile; None without.
        """
        types = (
            [array_type(leaf) for leaf in leaves],
            jax.ShapeDtypeStruct((), jnp.int32),
            jax.tree.map(array_type, carry),
            jax.ShapeDtypeStruct((rows,), jnp.int32) if work.k_bucket else None,
        )

        def program(leaves: Any, start: Any, carry: Any, index_map: Any) -> TileResult:
            return work.run(rebuild(leaves), rows, start, carry, index_map)

        return cls(*trace_without_consts(program, types))

    def digest(self) -> str:
        """Of its text, which is the same in every process, and names host callbacks by number alone."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()

    @property
    def is_compiled(self) -> bool:
        """Whether it has been compiled."""
        return self._compiled is not None

    def compile(self) -> None:
        """Compile it. A compiled program takes no other shapes, so that a run never compiles again unnoticed."""
        if self._compiled is None:
            self._compiled = self.lowered.compile()
            self.consts = [jax.device_put(const) for const in self.consts]

    def __call__(self, leaves: Sequence[Any], start: int, carry: Any, index_map: Any) -> TileResult:
        """Compute a tile."""
        self.compile()
        return self._compiled(self.consts, list(leaves), np.int32(start), carry, index_map)


def trace_without_consts(fn: Callable[..., Any], types: Sequence[Any]) -> tuple[Any, list[Any], Any]:
    """Lower a function so that no array is compiled in.

    Args:
        fn: What is traced.
        types: Of its arguments.

    Returns:
        The lowered function of `(consts, *args)`, the arrays that `fn` holds or closes over, and what it returns,
        abstractly.
    """
    traced, shapes = jax.make_jaxpr(fn, return_shape=True)(*types)
    treedef = jax.tree.structure(shapes)

    def run(consts: Any, *args: Any) -> Any:
        return treedef.unflatten(jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*jax.tree.leaves(args)))

    consts = list(traced.consts)
    return jax.jit(run).lower([array_type(const) for const in consts], *types), consts, shapes


def array_type(array: Any) -> jax.ShapeDtypeStruct:
    """The type that an array of the host or device has in a program."""
    dtype = array.dtype if isinstance(array, jax.Array) else jax.dtypes.canonicalize_dtype(array.dtype)
    return jax.ShapeDtypeStruct(np.shape(array), dtype)
