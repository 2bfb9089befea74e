"""Does the derivative that a `jax.custom_vjp` or `jax.custom_jvp` function brings along give the same in chunks?

A derivative that JAX makes itself follows from the values, and is per element where they are. One that a user wrote may
be anything: one that clips gradients by their norm would clip those of each chunk on their own.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, Var, jaxpr_as_fun

from xtrax.tiling._dependence.state import Batched, Mixed, Op, Shared, State, Total, names, varies, worst

_logger = logging.getLogger("xtrax.tiling")

_OF_ONE = names(
    """broadcast_in_dim convert_element_type copy copy_p cumsum imag layout_constraint neg optimization_barrier real
    reduce_precision reduce_sum reshape rev sharding_constraint slice squeeze transpose"""
)
"""Linear functions of one array. Rounding to another type is taken for linear, as everywhere in floating point."""

_OF_ALL = names("add add_any concatenate sub")
"""Linear functions of several arrays together."""


def backward_problem(op: Op, states: Sequence[State], results: Sequence[State]) -> Mixed | None:
    """Why a call of a `jax.custom_vjp` function may have other derivatives in chunks; None if it has the same.

    The backward pass must give each element a gradient of its own, and what they all share the sum over the elements of
    what each gives it. For what the function computes of shared values alone, the gradient comes as the sum over the
    elements of a chunk, so there it must be linear.

    Args:
        op: the call.
        states: those of its arguments.
        results: those of its results, from the values.
    """
    free, moving = _differentiable(op.eqn)
    if op.backward is None or not free or not moving or worst([*states, *results]):
        return None
    programs = [_pulled(eqn, free, moving) for eqn in (op.eqn, op.second)]
    if all(isinstance(program, Exception) for program in programs):
        return None  # it has values alone
    for program in programs:
        if isinstance(program, Exception):
            return op.undecided(f"its backward pass fails at one batch size: {type(program).__name__}: {program}")
    total = Total(op.dependent("it takes a sum over the elements").cause)
    cotangents = [total if isinstance(results[k], Shared) else results[k] for k in moving]
    gradients = op.backward(*programs, (*states, *cotangents))
    zero = [a and b for a, b in zip(*(_zeros(program) for program in programs), strict=True)]
    for i, gradient, is_zero in zip(free, gradients, zero, strict=True):
        if is_zero or _fits(states[i], gradient):
            continue
        detail = gradient.cause if isinstance(gradient, Mixed) and not isinstance(gradient, Total) else None
        why = f" ({detail.operation}: {detail.detail})" if detail else ""
        what = "what all elements share" if isinstance(states[i], Shared) else "the batch"
        return op.undecided(
            f"the backward pass that jax.custom_vjp gives it, run for each chunk on its own, is not known to give "
            f"{what} the gradient of the whole batch{why}"
        )
    return None


def tangent_problem(op: Op, states: Sequence[State], results: Sequence[State]) -> Mixed | None:
    """Why a call of a `jax.custom_jvp` function has other derivatives in chunks; None if that is not known.

    Its rule is linear in the tangents, or JAX could not transpose it. So the tangent of an element has but to be one of
    the element alone, and what is not followed is trusted.

    Args:
        op: the call.
        states: those of its arguments.
        results: those of its results, from the values.
    """
    free, moving = _differentiable(op.eqn)
    if op.backward is None or not free or not moving or worst([*states, *results]) or _is_jax(op.eqn):
        return None
    programs = [_pushed(eqn, free, moving) for eqn in (op.eqn, op.second)]
    if any(isinstance(program, Exception) for program in programs):
        return None
    for tangent in op.backward(*programs, (*states, *(states[i] for i in free))):
        if isinstance(tangent, Mixed) and tangent.cause.kind == "dependent":
            return op.undecided(
                "the derivative that jax.custom_jvp gives it is not that of each element on its own "
                f"({tangent.cause.operation}: {tangent.cause.detail})"
            )
    return None


def _differentiable(eqn: Any) -> tuple[list[int], list[int]]:
    """The arguments and the results that a derivative concerns."""
    atoms = enumerate(eqn.invars)
    free = [i for i, atom in atoms if not isinstance(atom, Literal) and jnp.issubdtype(atom.aval.dtype, jnp.inexact)]
    return free, [k for k, var in enumerate(eqn.outvars) if jnp.issubdtype(var.aval.dtype, jnp.inexact)]


def _is_jax(eqn: Any) -> bool:
    """Whether JAX itself brings the rule, as for activations: true derivatives, and too many to trace each."""
    info = getattr(getattr(eqn.params.get("call_jaxpr"), "jaxpr", None), "debug_info", None)
    return (getattr(info, "func_filename", None) or "").startswith(os.path.dirname(jax.__file__) + os.sep)


def _fits(state: State, gradient: State) -> bool:
    if isinstance(state, Batched):
        uniform = isinstance(gradient, Batched) and gradient.outer is None
        same = isinstance(gradient, Batched) and (gradient.outer, gradient.inner) == (state.outer, state.inner)
        return isinstance(gradient, Batched) and gradient.dim == state.dim and gradient.plain and (uniform or same)
    return isinstance(gradient, Total)


def _pulled(eqn: Any, free: list[int], moving: list[int]) -> Any:
    """The program that pulls cotangents of the results `moving` back to the arguments `free`, or what it raises."""

    def pull(*values: Any) -> Any:
        args, cotangents = list(values[: len(eqn.invars)]), values[len(eqn.invars) :]
        return jax.vjp(_called(eqn, args, free, moving), *(args[i] for i in free))[1](list(cotangents))

    return _traced(pull, [atom.aval for atom in eqn.invars] + [eqn.outvars[k].aval for k in moving])


def _pushed(eqn: Any, free: list[int], moving: list[int]) -> Any:
    """The program of the tangents of the results `moving` from those of the arguments `free`, or what it raises."""

    def push(*values: Any) -> Any:
        args, tangents = list(values[: len(eqn.invars)]), values[len(eqn.invars) :]
        return jax.jvp(_called(eqn, args, free, moving), [args[i] for i in free], list(tangents))[1]

    return _traced(push, [atom.aval for atom in eqn.invars] + [eqn.invars[i].aval for i in free])


def _called(eqn: Any, args: list[Any], free: list[int], moving: list[int]) -> Any:
    """The call with its own derivative, as a function of the arguments `free` that returns the results `moving`."""
    ins, outs = [Var(atom.aval) for atom in eqn.invars], [Var(var.aval) for var in eqn.outvars]
    inner = getattr(eqn.params["call_jaxpr"], "jaxpr", eqn.params["call_jaxpr"])
    body = inner.replace(
        constvars=[], invars=ins, outvars=outs, eqns=[eqn.replace(invars=ins, outvars=outs)],
        debug_info=inner.debug_info.with_unknown_names(),
    )  # fmt: skip
    call = jaxpr_as_fun(ClosedJaxpr(body, []))

    def of_free(*moved: Any) -> list[Any]:
        given = list(args)
        for i, value in zip(free, moved, strict=True):
            given[i] = value
        results = call(*given)
        return [results[k] for k in moving]

    return of_free


def _traced(fn: Any, types: list[Any]) -> Any:
    try:
        return jax.make_jaxpr(fn)(*types)
    except Exception as error:
        # A rule of the user may raise anything; then there is no derivative.
        _logger.debug("no derivative to follow", exc_info=True)
        return error


def _zeros(program: Any) -> list[bool]:
    """Which results are nothing but zeros, as where a backward pass gives None."""
    made = {var: eqn for eqn in program.jaxpr.eqns for var in eqn.outvars}

    def is_zero(atom: Any) -> bool:
        if isinstance(atom, Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        eqn = made.get(atom)
        return eqn is not None and eqn.primitive.name == "broadcast_in_dim" and is_zero(eqn.invars[0])

    return [is_zero(atom) for atom in program.jaxpr.outvars]


def sum_over_elements(op: Op, states: Sequence[State]) -> State | None:
    """The state of an operation that sums over the elements, or takes such sums; None for any other."""
    if not any(isinstance(state, Total) for state in states):
        return Total(op.dependent("it sums over the elements").cause) if _sums(op, states) else None
    if mixed := worst([state for state in states if not isinstance(state, Total)]):
        return mixed
    totals = [isinstance(state, Total) for state in states]
    known = states[totals.index(True)]
    shared = all(isinstance(state, (Shared, Total)) for state in states)
    linear = (
        (op.name in _OF_ONE and len(states) == 1 and jnp.issubdtype(op.eqn.outvars[0].aval.dtype, jnp.inexact))
        or (op.name in _OF_ALL and all(totals))
        or (op.name in ("mul", "dot_general") and shared and totals.count(True) == 1)
        or (op.name == "div" and shared and totals == [True, False])
        or (op.name == "select_n" and shared and not totals[0] and all(totals[1:]))
    )
    # Spread over the batch and summed again, it would be taken as often as there are elements.
    linear = linear and not any(varies(dim) for dims in op.outs for dim in dims)
    return known if linear else op.undecided("it is not linear in a sum over the elements, and there is one a chunk")


def _sums(op: Op, states: Sequence[State]) -> bool:
    """Whether the result is the sum over the elements of something of each."""
    batched = [state for state in states if isinstance(state, Batched) and state.plain]
    if not batched or len(batched) != len(states):
        return False
    if op.name == "reduce_sum":
        return batched[0].dim in op.params["axes"]
    if len(batched) != 2 or (batched[0].outer, batched[0].inner) != (batched[1].outer, batched[1].inner):
        return False
    left, right = batched
    if op.name == "dot_general":
        (contract_left, contract_right), _ = op.params["dimension_numbers"]
        return (left.dim, right.dim) in zip(contract_left, contract_right, strict=True)
    if op.name == "conv_general_dilated":
        numbers = op.params["dimension_numbers"]
        ungrouped = op.params["feature_group_count"] == op.params["batch_group_count"] == 1
        return ungrouped and left.dim == numbers.lhs_spec[1] and right.dim == numbers.rhs_spec[1]
    return False
