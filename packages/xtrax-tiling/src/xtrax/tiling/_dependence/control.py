"""Where the batch lies in the results of the primitives that hold programs: calls, branches and loops.

These rules also take arguments that are `Mixed` or an `Element`, and tell the results apart.
"""

from typing import Any

import jax

from xtrax.tiling._dependence.gradient import backward_problem, tangent_problem
from xtrax.tiling._dependence.state import Batched, Element, Mixed, Op, State, join, names, shifted, worst

CALLS = names(
    """checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call
    eval_jaxpr jit pjit
    remat remat2 remat_call"""
)
INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr", "call")
"""The names that such a parameter has."""


def call(op: Op, *states: State) -> list[State]:
    """A function call."""
    key = next((key for key in INNER if key in op.params), None)
    if key is None:
        return [op.undecided("the called program is not found")] * len(op.outs)
    return op.walk(op.params[key], op.other[key], states)


def custom_vjp_call(op: Op, *states: State) -> list[State]:
    """A function call whose derivative is said to be another, which is to be the same in chunks too."""
    results = call(op, *states)
    problem = backward_problem(op, states, results)
    return results if problem is None else [problem] * len(results)


def custom_jvp_call(op: Op, *states: State) -> list[State]:
    """The same, where the derivative is forward."""
    results = call(op, *states)
    problem = tangent_problem(op, states, results)
    return results if problem is None else [problem] * len(results)


def expanded_call(op: Op, *states: State) -> list[State]:
    """A primitive that jax 0.12 and later keep whole while tracing, such as a search: what it expands to."""
    programs = [_expanded(params.get("_prim")) for params in (op.params, op.other)]
    if any(program is None for program in programs):
        return [worst(states) or op.undecided("what it expands to is not known")] * len(op.outs)
    return op.walk(*programs, states)


def _expanded(primitive: Any) -> Any:
    """The program of such a primitive; None if it does not tell."""
    if not all(hasattr(primitive, name) for name in ("expand", "in_avals_flat", "in_tree")):
        return None

    def expand(*leaves: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves))

    types = [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in primitive.in_avals_flat]
    return jax.make_jaxpr(expand)(*types)


def linear_solve(op: Op, *states: State) -> list[State]:
    """`lax.custom_linear_solve`: what its solver does."""
    lengths, solve = op.params["const_lengths"], op.params["jaxprs"].solve
    start = lengths.matvec + lengths.vecmat
    rhs = sum(lengths[i] or 0 for i in range(len(lengths)))
    return op.walk(solve, op.other["jaxprs"].solve, (*states[start : start + lengths.solve], *states[rhs:]))


def cond(op: Op, predicate: State, *states: State) -> list[State]:
    """What either branch gives; the predicate must be shared, or that of the one element at hand."""
    if isinstance(predicate, Mixed):
        return [predicate] * len(op.outs)
    if isinstance(predicate, Batched):
        return [op.undecided("its predicate is a batch")] * len(op.outs)
    branches = [
        op.walk(branch, other, states)
        for branch, other in zip(op.params["branches"], op.other["branches"], strict=True)
    ]
    results = branches[0]
    for branch in branches[1:]:
        results = [join(before, after, op) for before, after in zip(results, branch, strict=True)]
    return [join(result, predicate, op) for result in results] if isinstance(predicate, Element) else results


def while_loop(op: Op, *states: State) -> list[State]:
    """A fixed point of the carry. A predicate with the batch in front stops each element on its own."""
    n_cond, n_body = op.params["cond_nconsts"], op.params["body_nconsts"]
    cond_consts, body_consts = states[:n_cond], states[n_cond : n_cond + n_body]

    def step(carry: list[State]) -> list[State]:
        return op.walk(op.params["body_jaxpr"], op.other["body_jaxpr"], (*body_consts, *carry))

    carry = _fixed_point(op, step, list(states[n_cond + n_body :]))
    (going,) = op.walk(op.params["cond_jaxpr"], op.other["cond_jaxpr"], (*cond_consts, *carry))
    if isinstance(going, Mixed):
        return [going] * len(carry)
    if isinstance(going, Batched):
        return [op.combine((going, state)) if isinstance(state, (Batched, Mixed)) else
                op.undecided("a loop whose predicate is a batch carries what is none") for state in carry]  # fmt: skip
    return [join(state, going, op) for state in carry] if isinstance(going, Element) else carry


def _fixed_point(op: Op, step: Any, carry: list[State]) -> list[State]:
    while True:
        # Each round that changes anything moves an entry up a chain of at most four states, so this ends.
        after = [join(old, new, op) for old, new in zip(carry, step(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def scan(op: Op, *states: State) -> list[State]:
    """Over another dimension a fixed point of the carry; over the batch itself, every step is one element."""
    n_consts, n_carry = scan_counts(op.params)
    consts, carry, xs = states[:n_consts], list(states[n_consts : n_consts + n_carry]), states[n_consts + n_carry :]
    lengths = (op.params["length"], op.other["length"])
    if lengths[0] != lengths[1]:
        if op.in_element or not op.is_batch(lengths):
            problem = worst(states) or op.undecided("the number of its steps changes with the batch size")
            return [problem] * len(op.outs)
        return _scan_elements(op, consts, carry, xs)
    slices = [shifted(x, -1) for x in xs]

    def step(carry: list[State]) -> list[State]:
        return op.walk(op.params["jaxpr"], op.other["jaxpr"], (*consts, *carry, *slices))

    carry = _fixed_point(op, lambda before: step(before)[:n_carry], carry)
    return [*carry, *(shifted(y, 1) for y in step(carry)[n_carry:])]


def _scan_elements(op: Op, consts: tuple[State, ...], carry: list[State], xs: tuple[State, ...]) -> list[State]:
    """A loop whose steps are the elements of the batch, as `jax.lax.map` makes it."""

    def seen(state: State) -> State:
        if isinstance(state, Batched):
            return op.dependent("a loop over the batch reads a whole batch at every step")
        return state

    def element(state: State) -> State:
        if isinstance(state, Batched):
            whole = (state.dim, state.outer, state.inner) == (0, 1, 1)
            return (Element() if state.plain else op.positional()) if whole else seen(state)
        return state

    body = getattr(op.params["jaxpr"], "jaxpr", op.params["jaxpr"])
    first = len(consts)
    unchanged = [body.outvars[i] is body.invars[first + i] for i in range(len(carry))]
    carried = [
        seen(state) if same else worst((state,)) or op.dependent("it carries a value from one element to the next")
        for state, same in zip(carry, unchanged, strict=True)
    ]
    inside = (*(seen(state) for state in consts), *carried, *(element(state) for state in xs))
    results = op.walk(op.params["jaxpr"], op.other["jaxpr"], inside, in_element=True)
    ys = [state if isinstance(state, Mixed) else Batched(0) for state in results[len(carry) :]]
    return [*(old if same else new for old, new, same in zip(carry, carried, unchanged, strict=True)), *ys]


def scan_counts(params: Any) -> tuple[int, int]:
    """How many arguments of a scan are constants, and how many are carried."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    # jax 0.12 keeps the flattened trees of the three groups in place of their lengths.
    consts, carry, _ = params["ft_in"].unpack()
    return len(list(consts)), len(list(carry))


CONTROL = {
    **dict.fromkeys(CALLS, call),
    "call_hi_primitive": expanded_call,
    "custom_jvp_call": custom_jvp_call,
    "custom_vjp_call": custom_vjp_call,
    "cond": cond,
    "custom_linear_solve": linear_solve,
    "scan": scan,
    "while": while_loop,
}
"""The rules of these primitives."""
