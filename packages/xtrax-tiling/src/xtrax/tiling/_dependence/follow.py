"""Follow the batch through a program that was traced at two batch sizes, operation by operation, in lockstep.

What changes between the two programs is what depends on the batch size: a dimension that does holds the batch, and a
number that does makes every result computed from it depend on the size of the batch.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import Literal

from xtrax.tiling._dependence.control import CALLS, CONTROL, INNER
from xtrax.tiling._dependence.gradient import sum_over_elements
from xtrax.tiling._dependence.indexing import INDEXING
from xtrax.tiling._dependence.rules import MAKERS, RULES
from xtrax.tiling._dependence.state import (
    Batched,
    Cause,
    Dims,
    Element,
    Mixed,
    Op,
    Shared,
    State,
    Total,
    holds_positions,
    names,
    settle,
    source_line,
    varies,
    worst,
)

_OF_SHAPE = names(
    """feature_group_count length limit_indices new_sizes out_sharding reps shape sharding sizes slice_sizes
    start_indices"""
)
"""Parameters that may change with the batch size, since the rules look at them or the shapes imply them."""

_PROGRAMS = names(
    """_prim branches body_jaxpr bwd bwd_jaxpr_thunk cond_jaxpr const_lengths ctx_mesh ft_in ft_out fwd fwd_jaxpr_thunk
    in_layouts in_shardings in_tree jaxprs jvp jvp_jaxpr_fun jvp_jaxpr_thunk name out_layouts out_shardings out_tree
    out_trees policy rule"""
) | frozenset(INNER)
"""Parameters of calls and loops that their rules walk, or that say nothing of the values."""

_TOLERANT = {"select_n", "dynamic_slice", "dynamic_update_slice", "optimization_barrier"}
"""Primitives whose rules take arguments that are mixed."""


def follow(first: Any, second: Any, states: Sequence[State], sizes: tuple[int, int]) -> list[State]:
    """The states of the results of a program.

    Args:
        first: the closed jaxpr at the first batch size.
        second: the same function's at the second.
        states: those of its arguments.
        sizes: both batch sizes, different and at least 2.
    """
    return _Walk(sizes)(first, second, states)


_KNOWN = CONTROL.keys() | INDEXING.keys() | MAKERS.keys() | RULES.keys()
_UNKNOWN = "what it does to a batch is not known"


class _Walk:
    """The interpreter.

    Args:
        sizes: both batch sizes.
        in_element: whether it is inside a loop over the batch.
        backward: whether it follows a backward pass, whose own derivatives are not looked at.
        sums: whether it tells sums over the elements apart from what else is mixed.
    """

    def __init__(
        self, sizes: tuple[int, int], in_element: bool = False, backward: bool = False, sums: bool = False
    ) -> None:
        self.sizes = sizes
        self.in_element = in_element
        self.backward = backward
        self.sums = sums

    def __call__(self, first: Any, second: Any, states: Sequence[State], in_element: bool = False) -> list[State]:
        """The states of the results of a pair of programs."""
        if in_element and not self.in_element:
            return _Walk(self.sizes, True, self.backward)(first, second, states)
        one, two = getattr(first, "jaxpr", first), getattr(second, "jaxpr", second)
        try:
            return self._run(one, two, _consts(first), _consts(second), states)
        except _DivergedError as diverged:
            return [Mixed(diverged.cause)] * len(one.outvars)

    def _run(self, one: Any, two: Any, consts: Any, others: Any, states: Sequence[State]) -> list[State]:
        agree = _lengths(one) == _lengths(two) and len(consts) == len(others) == len(one.constvars)
        if not agree or len(one.invars) != len(states):
            raise _DivergedError(Cause("undecided", None, None, _DIFFERENT))
        env: dict[Any, State] = dict(zip(one.invars, states, strict=True))
        twin: dict[Any, Any] = dict(zip(one.invars, two.invars, strict=True))
        twin.update(zip(one.constvars, two.constvars, strict=True))
        for var, value, other in zip(one.constvars, consts, others, strict=True):
            env[var] = _value_state(value, other, self.sizes, None)

        def read(atom: Any, other: Any, eqn: Any) -> State:
            if isinstance(atom, Literal) != isinstance(other, Literal):
                raise _DivergedError(_different(eqn))
            if isinstance(atom, Literal):
                return _value_state(atom.val, other.val, self.sizes, eqn)
            if twin.get(atom) is not other:
                raise _DivergedError(_different(eqn))
            return env[atom]

        for eqn, second in zip(one.eqns, two.eqns, strict=False):
            same = eqn.primitive.name == second.primitive.name
            if not (same and len(eqn.invars) == len(second.invars) and len(eqn.outvars) == len(second.outvars)):
                raise _DivergedError(_different(eqn))
            taken = [read(atom, other, eqn) for atom, other in zip(eqn.invars, second.invars, strict=True)]
            for var, other, state in zip(eqn.outvars, second.outvars, self._apply(eqn, second, taken), strict=True):
                env[var], twin[var] = state, other
        if len(one.eqns) != len(two.eqns):
            raise _DivergedError(Cause("undecided", None, None, _DIFFERENT))
        return [read(atom, other, None) for atom, other in zip(one.outvars, two.outvars, strict=True)]

    def _apply(self, eqn: Any, second: Any, states: list[State]) -> list[State]:
        # A constant has no operation of its own: it is named by the first that uses it.
        states = [_located(state, eqn, named=False) for state in states]
        walk = self
        if self.sums and eqn.primitive.name in CONTROL and eqn.primitive.name not in CALLS:
            # Branches and loops join values, and what they make of a sum over the elements is not followed.
            walk = _Walk(self.sizes, self.in_element, self.backward)
            states = [Mixed(state.cause) if isinstance(state, Total) else state for state in states]
        # A loop over the batch runs a backward pass once for each element, whatever the chunks.
        ends = self.backward or self.in_element
        op = Op(
            name=eqn.primitive.name,
            params=eqn.params,
            other=second.params,
            ins=_dims(eqn.invars, second.invars),
            outs=_dims(eqn.outvars, second.outvars),
            literals=tuple(_scalar(atom) for atom in eqn.invars),
            sizes=self.sizes,
            eqn=eqn,
            second=second,
            walk=walk,
            in_element=self.in_element,
            backward=None if ends else _Walk(self.sizes, backward=True, sums=True),
        )
        found = _rule_of(op, states, self.sums)
        results = found if isinstance(found, list) else [found] * len(op.outs)
        if op.name in CONTROL:
            results = [_located(state, eqn, named=True) for state in results]
        return [settle(state, dims, op) for state, dims in zip(results, op.outs, strict=True)]


def _located(state: State, eqn: Any, named: bool) -> State:
    """With the line of `eqn`, if the cause has an operation but no line, or, with `named` false, neither.

    Inside a jitted function of a library no line is the user's; then that of the call is.
    """
    if not isinstance(state, Mixed) or state.cause.source is not None or (state.cause.operation is not None) != named:
        return state
    operation = state.cause.operation or eqn.primitive.name
    return dataclasses.replace(
        state, cause=dataclasses.replace(state.cause, operation=operation, source=source_line(eqn))
    )


def _rule_of(op: Op, states: list[State], sums: bool) -> State | list[State]:
    """Apply what is known of the primitive."""
    if changed := _changed_params(op):
        states = [Mixed(state.cause) if isinstance(state, Total) else state for state in states]
        # What an unknown parameter of an unknown primitive means is unknown too.
        return worst(states) or (op.dependent(changed) if op.name in _KNOWN else op.undecided(_UNKNOWN))
    if rule := CONTROL.get(op.name):
        return rule(op, *states)
    if sums and (state := sum_over_elements(op, states)):
        return state
    if op.name not in _TOLERANT and (mixed := worst(states)):
        return mixed
    fixed = not any(varies(dim) for dims in op.outs for dim in dims)
    if fixed and all(isinstance(state, (Shared, Element)) for state in states):
        # A pure function of what does not change with the batch does not either, whatever it is.
        return Element() if any(isinstance(state, Element) for state in states) else Shared()
    if not any(isinstance(state, (Batched, Mixed)) for state in states):
        rule = MAKERS.get(op.name)
        if rule is None or op.in_element:
            return op.undecided("it makes an array whose shape changes with the batch size")
        return rule(op, *states)
    rule = RULES.get(op.name) or INDEXING.get(op.name)
    return rule(op, *states) if rule else op.undecided(_UNKNOWN)


def _changed_params(op: Op) -> str | None:
    """What to say if a parameter that is no shape differs between the batch sizes."""
    # A reduction by a function has it twice, as the function, new at every trace, and as its program.
    ignored = _OF_SHAPE | _PROGRAMS if op.name in CONTROL else _OF_SHAPE | {"computation"}
    if op.name == "slice":
        starts = zip(op.ins[0], op.params["start_indices"], op.other["start_indices"], strict=True)
        if any(start != other for dim, start, other in starts if not varies(dim)):
            return "it slices where the batch size says"
    for key in op.params.keys() | op.other.keys():
        if key in ignored:
            continue
        value, other = op.params.get(key), op.other.get(key)
        if not _equal(value, other):
            return f"its parameter {key} changes with the batch size"
    return None


def _equal(a: Any, b: Any) -> bool:
    """Whether two parameters mean the same; programs are compared by their text."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if hasattr(a, "eqns") or hasattr(a, "jaxpr"):
        return not _consts(a) and not _consts(b) and str(a) == str(b)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (np.ndarray, np.generic, jax.Array, float, complex)):
        return _same_values(a, b)
    return bool(a == b)


def _value_state(value: Any, other: Any, sizes: tuple[int, int], eqn: Any) -> State:
    """The state of a constant, from its values at both batch sizes; `eqn` is what uses it."""
    shapes = (np.shape(value), np.shape(other))
    if value is other or (shapes[0] == shapes[1] and _same_values(value, other)):
        return Shared()
    if shapes[0] == shapes[1]:
        shown = f" ({value} at {sizes[0]} elements, {other} at {sizes[1]})" if not shapes[0] else ""
        return _depends(eqn, f"a constant changes with the batch size{shown}")
    if len(shapes[0]) == len(shapes[1]) and not any(isinstance(v, Tracer) or _is_key(v) for v in (value, other)):
        varying = [i for i, dim in enumerate(zip(*shapes, strict=True)) if varies(dim)]
        if len(varying) == 1 and all(np.shape(v)[varying[0]] == n for v, n in zip((value, other), sizes, strict=True)):
            rows = [np.moveaxis(np.asarray(v), varying[0], 0) for v in (value, other)]
            if all(np.array_equal(row, np.broadcast_to(rows[0][:1], row.shape)) for row in rows):
                return Batched(varying[0])
            if all(holds_positions(row.dtype) and np.array_equal(row, np.arange(len(row))) for row in rows):
                return Batched(0, fact="position")
    return _depends(eqn, "a constant has an entry for each position of the batch, and a chunk would meet other entries")


def _depends(eqn: Any, detail: str) -> Mixed:
    return Mixed(Cause("dependent", _name(eqn), source_line(eqn), detail))


def _name(eqn: Any) -> str | None:
    return eqn.primitive.name if eqn is not None else None


def _same_values(a: Any, b: Any) -> bool:
    """Whether two constants agree, NaNs included; what has no values yet agrees with itself alone."""
    if a is b:
        return True
    if isinstance(a, Tracer) or isinstance(b, Tracer) or _is_key(a) != _is_key(b):
        return False
    if _is_key(a):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    one, two = np.asarray(a), np.asarray(b)
    return (
        one.dtype == two.dtype and one.shape == two.shape and bool(np.all((one == two) | ((one != one) & (two != two))))
    )


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def _consts(program: Any) -> Sequence[Any]:
    return getattr(program, "consts", ())


def _lengths(program: Any) -> tuple[int, ...]:
    return (len(program.invars), len(program.outvars), len(program.constvars))


def _dims(atoms: Iterable[Any], others: Iterable[Any]) -> tuple[Dims, ...]:
    """The shapes at both sizes. A rank that differs shows as a dimension that no rule knows."""
    found = []
    for atom, other in zip(atoms, others, strict=True):
        one, two = getattr(atom.aval, "shape", ()), getattr(other.aval, "shape", ())
        found.append(tuple(itertools.zip_longest(one, two, fillvalue=-1)))
    return tuple(found)


def _scalar(atom: Any) -> Any:
    return np.asarray(atom.val).item() if isinstance(atom, Literal) and np.ndim(atom.val) == 0 else None


_DIFFERENT = "the program itself changes with the batch size"


def _different(eqn: Any) -> Cause:
    return Cause("undecided", _name(eqn), source_line(eqn), _DIFFERENT)


class _DivergedError(Exception):
    """The two programs are not the same operations on the same values."""

    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.detail)
        self.cause = cause
