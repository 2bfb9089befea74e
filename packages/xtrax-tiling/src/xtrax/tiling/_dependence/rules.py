"""Where the batch lies in the results of the primitives that compute: elementwise, shape, reduction, contraction.

A rule takes the operation and the states of its arguments, of which at least one is `Batched` and none is `Mixed` or an
`Element`, and returns one state for all results or a list of them. What has no rule here is undecided.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

from xtrax.tiling._dependence.state import Batched, Dims, Op, Shared, State, holds_positions, names, product, varies

Rule: TypeAlias = Callable[..., State | list[State]]

ELEMENTWISE = names(
    """abs acos acosh add add_any add_jaxvals and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag integer_pow is_finite le le_to lgamma
    log log1p log2 logistic lt lt_to max min mul mulhi name ne neg nextafter not one_minus_square or polygamma
    polynomial population_count pow random_clone random_fold_in random_gamma real reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin
    sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor zeta"""
)
"""Primitives whose results at one place depend on their arguments there, or on scalars or axes of size one."""

IDENTITY = names("device_put layout_constraint mesh_cast optimization_barrier pvary reshard sharding_constraint")
"""Primitives that return their arguments, each as it is."""

REDUCTIONS = names("argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum reduce_xor")
CUMULATIVE = names("cumlogsumexp cummax cummin cumprod cumsum")
WINDOWED = names(
    """reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add
    select_and_scatter_add"""
)
LEADING = {
    "cholesky": 2, "eig": 2, "eigh": 2, "geqrf": 2, "hessenberg": 2, "lu": 2, "qr": 2, "schur": 2, "svd": 2,
    "triangular_solve": 2, "tridiagonal": 2, "householder_product": 2, "tridiagonal_solve": 1,
    "lu_pivots_to_permutation": 1, "random_wrap": 1, "top_k": 1,
}  # fmt: skip
"""How many trailing dimensions of the first argument a primitive mixes, the ones before being independent."""


def elementwise(op: Op, *states: State) -> State:
    """Every place on its own."""
    return op.combine(states)


def identity(op: Op, *states: State) -> list[State]:
    """Every argument is a result."""
    return list(states)


def convert(op: Op, state: State) -> State:
    """A position stays one in an integer type that holds it."""
    if isinstance(state, Batched) and not state.plain and not holds_positions(op.params["new_dtype"]):
        return op.positional()
    return state


def less(op: Op, *states: State) -> State:
    """Positions are not negative, which the normalisation of an index asks."""
    match states, op.literals:
        case (Batched(fact="position") as state, Shared()), (_, 0):
            return Batched(state.dim, state.outer, state.inner, "false")
    return op.combine(states)


def select(op: Op, *states: State) -> State:
    """A predicate that is known to be false selects the first case."""
    if isinstance(states[0], Batched) and states[0].fact == "false":
        return states[1]
    return op.combine(states)


def transpose(op: Op, state: Batched) -> State:
    """The dimension moves."""
    if isinstance(state.fact, tuple):
        return op.positional()
    return state.at(tuple(op.params["permutation"]).index(state.dim))


def squeeze(op: Op, state: Batched) -> State:
    """Dimensions of size one go."""
    if isinstance(state.fact, tuple):
        return op.positional()
    return state.at(state.dim - sum(dim < state.dim for dim in op.params["dimensions"]))


def broadcast_in_dim(op: Op, state: State, *_: State) -> State:
    """Dimensions are added, of which one may be the batch if the operand has none."""
    mapped = [int(dim) for dim in op.params["broadcast_dimensions"]]
    if isinstance(state, Batched):
        if isinstance(state.fact, tuple):
            return op.positional()
        return state.at(mapped[state.dim])
    added = [i for i, dim in enumerate(op.outs[0]) if varies(dim)]
    if len(added) != 1:
        return op.undecided("an array is made whose shape holds the batch size more than once")
    return _uniform(op, added[0])


def _uniform(op: Op, dim: int) -> Batched:
    """Equal entries along a dimension."""
    return Batched(dim) if op.is_batch(op.outs[0][dim]) else Batched(dim, None, None)


def reshape(op: Op, state: Batched, *_: State) -> State:
    """The batch stays whole if it is a factor of one dimension, before and after."""
    if isinstance(state.fact, tuple):
        return op.positional()
    dims, dim = op.ins[0], state.dim
    if (order := op.params.get("dimensions")) is not None:
        dims, dim = tuple(dims[i] for i in order), tuple(order).index(dim)
    layouts = [(state.outer, state.inner)]
    if state.outer is None or state.inner is None:
        length = dims[dim][0] // op.sizes[0]
        layouts = [(1, length), (length, 1)]
    for outer, inner in layouts:
        if found := _regrouped(op, dims, dim, outer, inner):
            if state.plain or found[1:] == (1, 1):
                return Batched(*found, fact=state.fact)
            return op.positional()
    return op.undecided("a reshape splits the batch, or moves it across other dimensions")


def _regrouped(op: Op, dims: Dims, dim: int, outer: Any, inner: Any) -> tuple[int, int, int] | None:
    """The dimension, outer and inner factor that the batch has in the new shape, if it has one place in it."""
    shape = op.outs[0]
    places = [i for i, new in enumerate(shape) if varies(new)]
    if len(places) != 1:
        return None
    place = places[0]
    before, after = product(dims[:dim], 0) * outer, product(dims[dim + 1 :], 0) * inner
    left, right = product(shape[:place], 0), product(shape[place + 1 :], 0)
    if left == 0 or right == 0 or before % left or after % right:
        return None
    new = (place, before // left, after // right)
    length = new[1] * new[2]
    return new if shape[place] == (length * op.sizes[0], length * op.sizes[1]) else None


def iota(op: Op) -> State:
    """Counts along a dimension."""
    dim, shape = op.params["dimension"], op.outs[0]
    if varies(shape[dim]):
        exact = op.is_batch(shape[dim]) and holds_positions(op.params["dtype"])
        return Batched(dim, fact="position") if exact else op.positional()
    added = [i for i, size in enumerate(shape) if varies(size)]
    return _uniform(op, added[0])


def concatenate(op: Op, *states: State) -> State:
    """Along the batch, whole batches one after another are one with a larger outer factor."""
    dim = op.params["dimension"]
    batched = [state for state in states if isinstance(state, Batched)]
    if all(state.dim == dim for state in batched) and len(batched) == len(states):
        if all(state.inner == 1 and state.plain for state in batched):
            return Batched(dim, sum(state.outer or 0 for state in batched), 1)
        return op.dependent("arrays are joined along the batch")
    if any(state.fact == "position" or isinstance(state.fact, tuple) for state in batched):
        return _columns(op, dim, states)
    return op.combine(states)


def _columns(op: Op, dim: int, states: tuple[State, ...]) -> State:
    """Index vectors of which some components are positions, as `x[jnp.arange(n), labels]` makes them."""
    columns: set[int] = set()
    start = 0
    for state, dims in zip(states, op.ins, strict=True):
        if not isinstance(state, Batched) or (state.outer, state.inner) != (1, 1) or isinstance(state.fact, tuple):
            return op.positional()
        if state.fact == "position":
            columns.update(range(start, start + dims[dim][0]))
        start += dims[dim][0]
    if len({state.dim for state in states if isinstance(state, Batched)}) != 1:
        return op.positional()
    first = states[0]
    assert isinstance(first, Batched)
    return Batched(first.dim, 1, 1, (dim, frozenset(columns)))


def stack(op: Op, *states: State) -> State:
    """A new dimension, of as many entries as there are operands."""
    state = op.combine(states)
    if not isinstance(state, Batched):
        return state
    return state.at(state.dim + (state.dim >= op.params["axis"]))


def unstack(op: Op, state: Batched) -> State:
    """The entries of a dimension, each without it."""
    axis = op.params["axis"]
    if state.dim == axis:
        return op.dependent("the batch is taken apart by position")
    found = op.combine((state,))
    return found.at(found.dim - (found.dim > axis)) if isinstance(found, Batched) else found


def tile(op: Op, state: State) -> State:
    """Whole copies, one after another."""
    if isinstance(state, Batched):
        found = op.combine((state,))
        if not isinstance(found, Batched) or found.outer is None:
            return found
        return Batched(found.dim, found.outer * op.params["reps"][found.dim], found.inner)
    places = [i for i, dim in enumerate(op.outs[0]) if varies(dim)]
    if len(places) != 1 or (op.params["reps"][places[0]], op.other["reps"][places[0]]) != op.sizes:
        return op.undecided("copies are made whose number is not that of the elements")
    return Batched(places[0], 1, op.ins[0][places[0]][0])


def collective(op: Op, *states: State) -> State | list[State]:
    """Over other, named axes of an outer map."""
    if not all(isinstance(axis, str) for axis in op.params.get("axes", (0,))):
        return op.undecided("it reduces over axes that are not all named")
    return list(states)


def pad(op: Op, state: State, value: State) -> State:
    """Nothing may be added along the batch."""
    if isinstance(state, Batched) and any(op.params["padding_config"][state.dim]):
        return op.dependent("the batch is padded or cut, which moves its elements")
    return op.combine((state, value))


def slice_(op: Op, state: Batched) -> State:
    """Along the batch, all of it, or whole batches of several."""
    limits = tuple(zip(op.params["start_indices"], op.params["limit_indices"], strict=True))
    others = tuple(zip(op.other["start_indices"], op.other["limit_indices"], strict=True))
    dim, strides = state.dim, op.params["strides"]
    if strides is None or strides[dim] == 1:
        (start, stop), (other_start, other_stop) = limits[dim], others[dim]
        if (start, other_start) == (0, 0) and (stop, other_stop) == op.ins[0][dim]:
            return op.positional() if isinstance(state.fact, tuple) else state
        if state.plain and state.outer is not None and state.inner is not None:
            block, other_block = (state.inner * size for size in op.sizes)
            if start % block == stop % block == 0 and (other_start, other_stop) == (
                start // block * other_block,
                stop // block * other_block,
            ):
                return Batched(dim, (stop - start) // block, state.inner)
    return op.dependent("some elements of the batch are picked by their position")


def split(op: Op, state: Batched) -> State | list[State]:
    """As slices, one after another."""
    if state.dim != op.params["axis"]:
        return op.combine((state,))
    blocks = [(state.inner or 0) * size for size in op.sizes]
    sizes = list(zip(op.params["sizes"], op.other["sizes"], strict=True))
    if (
        not state.plain
        or not blocks[0]
        or any(size % blocks[0] or other != size // blocks[0] * blocks[1] for size, other in sizes)
    ):
        return op.dependent("the batch is split by position")
    return [Batched(state.dim, size // blocks[0], state.inner) for size, _ in sizes]


def rev(op: Op, state: Batched) -> State:
    """Reversed along other dimensions."""
    if state.dim in op.params["dimensions"]:
        return op.dependent("the batch is reversed")
    return op.combine((state,))


def reduction(op: Op, *states: State) -> State:
    """Over other dimensions."""
    axes = op.params.get("axes", op.params.get("dimensions"))
    state = op.combine(states)
    if not isinstance(state, Batched) or axes is None:
        return state if axes is not None else op.undecided("its axes are not known")
    if state.dim in axes:
        return op.dependent(f"it reduces over axis {state.dim}, along which the batch lies")
    return state.at(state.dim - sum(axis < state.dim for axis in axes))


def cumulative(op: Op, state: Batched) -> State:
    """Along another dimension."""
    if state.dim == op.params["axis"]:
        return op.dependent(f"it accumulates along axis {state.dim}, along which the batch lies")
    return op.combine((state,))


def approx_top_k(op: Op, state: Batched) -> State:
    """Along another dimension."""
    if state.dim == op.params["reduction_dimension"] % len(op.ins[0]):
        return op.dependent(f"it searches along axis {state.dim}, along which the batch lies")
    return op.combine((state,))


def sort(op: Op, *states: State) -> State:
    """Along another dimension; every operand is moved by the keys."""
    state = op.combine(states)
    if isinstance(state, Batched) and state.dim == op.params["dimension"]:
        return op.dependent(f"it sorts along axis {state.dim}, along which the batch lies")
    return state


def windowed(op: Op, *states: State) -> State:
    """Windows that are one wide along the batch."""
    state = op.combine(states)
    if not isinstance(state, Batched):
        return state
    settings = (("window_dimensions", 1), ("window_strides", 1), ("padding", (0, 0)), ("base_dilation", 1),
                ("window_dilation", 1))  # fmt: skip
    for key, trivial in settings:
        value = op.params.get(key)
        if value is not None and value[state.dim] != trivial:
            return op.dependent(f"its windows reach over axis {state.dim}, along which the batch lies")
    return state


def leading(op: Op, *states: State) -> State:
    """Linear algebra and the like: one problem for each index of the leading dimensions."""
    state = op.combine(states)
    core = LEADING[op.name]
    if op.name == "top_k" and op.params.get("axis", -1) not in (-1, len(op.ins[0]) - 1):
        return op.undecided("it works along an axis that is not the last")
    if isinstance(state, Batched) and state.dim >= len(op.ins[0]) - core:
        return op.dependent(f"it works along axis {state.dim}, along which the batch lies")
    return state


def fft(op: Op, state: Batched) -> State:
    """Over the trailing dimensions."""
    if state.dim >= len(op.ins[0]) - len(op.params["fft_lengths"]):
        return op.dependent(f"it transforms axis {state.dim}, along which the batch lies")
    return op.combine((state,))


def of_keys(op: Op, state: Batched) -> State:
    """Bits, splits and seeds of each key of an array of keys."""
    return op.combine((state,))


def new_random(op: Op) -> State:
    """Random numbers from one key, as many as there are elements."""
    return op.dependent(
        "one key gives numbers to the whole batch, and other numbers to a chunk; give each element a key of its own"
    )


def dot_general(op: Op, left: State, right: State) -> State:
    """The batch is a batch dimension of both sides, or a free dimension of one."""
    (contract_left, contract_right), (batch_left, batch_right) = op.params["dimension_numbers"]
    free_left = [i for i in range(len(op.ins[0])) if i not in contract_left and i not in batch_left]
    free_right = [i for i in range(len(op.ins[1])) if i not in contract_right and i not in batch_right]
    places: list[Batched] = []
    for state, contract, batch, free, shift in (
        (left, contract_left, batch_left, free_left, 0),
        (right, contract_right, batch_right, free_right, len(free_left)),
    ):
        if not isinstance(state, Batched):
            continue
        if not state.plain:
            return op.positional()
        if state.dim in contract:
            return op.dependent(f"it contracts axis {state.dim}, along which the batch lies")
        place = list(batch).index(state.dim) if state.dim in batch else len(batch) + shift + free.index(state.dim)
        places.append(state.at(place))
    if len(places) == 2 and places[0].dim != places[1].dim:
        return op.dependent("every element of the batch meets every other")
    return op.combine(places)


def conv_general_dilated(op: Op, left: State, right: State) -> State:
    """The batch lies along the batch dimension, the output features, or the groups that vmap makes of both."""
    numbers = op.params["dimension_numbers"]
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    groups = (op.params["feature_group_count"], op.other["feature_group_count"])
    if any(isinstance(state, Batched) and not state.plain for state in (left, right)):
        return op.positional()
    if op.params["batch_group_count"] != 1 or op.other["batch_group_count"] != 1:
        return op.undecided("the batch is grouped")
    match left, right:
        case Batched(dim=dim), Shared() if dim == lhs[0] and groups[0] == groups[1]:
            return left.at(out[0])
        case Shared(), Batched(dim=dim) if dim == rhs[0] and groups[0] == groups[1]:
            return right.at(out[1])
        case Batched(), Batched() if left.dim == lhs[1] and right.dim == rhs[0] and left.outer == right.outer == 1:
            each = groups[0] // op.sizes[0]
            whole = groups == (each * op.sizes[0], each * op.sizes[1])
            if whole and each and (left.inner or 0) % each == 0 and (right.inner or 0) % each == 0:
                return right.at(out[1])
    return op.dependent("it convolves along the batch")


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(IDENTITY, identity),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(CUMULATIVE, cumulative),
    **dict.fromkeys(WINDOWED, windowed),
    **dict.fromkeys(LEADING, leading),
    **dict.fromkeys(("random_bits", "random_split", "random_seed", "random_unwrap"), of_keys),
    "approx_top_k": approx_top_k,
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "conv_general_dilated": conv_general_dilated,
    "convert_element_type": convert,
    "dot_general": dot_general,
    "fft": fft,
    "lt": less,
    "pad": pad,
    **dict.fromkeys(("pmax", "pmin", "psum", "psum_invariant"), collective),
    "reduce": reduction,
    "reshape": reshape,
    "rev": rev,
    "select_n": select,
    "slice": slice_,
    "sort": sort,
    "split": split,
    "squeeze": squeeze,
    "stack": stack,
    "tile": tile,
    "transpose": transpose,
    "unstack": unstack,
}
"""The rules of primitives that take an array with the batch in it."""

MAKERS: dict[str, Rule] = {
    "broadcast_in_dim": broadcast_in_dim,
    "iota": iota,
    "random_bits": lambda op, *_: new_random(op),
    "random_split": lambda op, *_: new_random(op),
    "tile": tile,
}
"""The rules of primitives that make an array with the batch in its shape out of what has none."""
