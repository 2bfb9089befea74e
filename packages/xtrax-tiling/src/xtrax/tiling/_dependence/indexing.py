"""Where the batch lies in the results of slices at traced places, gathers and scatters."""

from xtrax.tiling._dependence.state import Batched, Mixed, Op, Shared, State, worst


def dynamic_slice(op: Op, state: State, *starts: State) -> State:
    """All of the batch, from wherever: a start along it is clamped to zero."""
    if not isinstance(state, Batched):
        return op.combine((state, *starts))
    sizes = (op.params["slice_sizes"][state.dim], op.other["slice_sizes"][state.dim])
    if sizes != op.ins[0][state.dim]:
        if isinstance(starts[state.dim], Shared):
            return op.dependent("some elements of the batch are picked by their position")
        return worst(starts) or op.undecided("it slices the batch at a place that is not known")
    return op.combine((state, *(start for dim, start in enumerate(starts) if dim != state.dim)))


def dynamic_update_slice(op: Op, state: State, update: State, *starts: State) -> State:
    """All of the batch is overwritten along its dimension."""
    if not (isinstance(state, Batched) and isinstance(update, Batched)):
        return worst((state, update, *starts)) or op.undecided("it writes to the batch")
    if op.ins[0][state.dim] != op.ins[1][state.dim]:
        return worst(starts) or op.undecided("it writes to some elements of the batch")
    return op.combine((state, update, *(start for dim, start in enumerate(starts) if dim != state.dim)))


def gather(op: Op, operand: State, indices: State) -> State:
    """The batch is in the indices, in the windows, in both as a batching dimension, or indexed by positions."""
    numbers = op.params["dimension_numbers"]
    offset, collapsed = tuple(numbers.offset_dims), tuple(numbers.collapsed_slice_dims)
    paired = _pairs(numbers.operand_batching_dims, numbers.start_indices_batching_dims)
    rank = len(op.outs[0])
    looked_up = [i for i in range(rank) if i not in offset]
    if isinstance(operand, Batched) and not operand.plain:
        return op.positional()
    if isinstance(operand, Shared) and isinstance(indices, Batched):
        return _of_lookup(op, indices, looked_up) if indices.plain else op.positional()
    if isinstance(operand, Batched) and isinstance(indices, Shared):
        dim = operand.dim
        sizes = (op.params["slice_sizes"][dim], op.other["slice_sizes"][dim])
        if sizes != op.ins[0][dim] or dim in (*collapsed, *paired, *numbers.start_index_map):
            return op.dependent("some elements of the batch are picked by their position")
        windows = [i for i in range(len(op.ins[0])) if i not in collapsed and i not in paired]
        return operand.at(offset[windows.index(dim)])
    if isinstance(operand, Batched) and isinstance(indices, Batched):
        by_position = _by_position(op, indices, tuple(numbers.start_index_map), operand)
        if paired.get(operand.dim) == indices.dim or (by_position and operand.dim in collapsed):
            if not indices.plain and not by_position:
                return op.positional()
            found = op.combine((operand.at(0), Batched(0, indices.outer, indices.inner)))
            return found if isinstance(found, Mixed) else _of_lookup(op, indices, looked_up)
    return op.undecided("it indexes the batch with numbers that are not known")


def _pairs(operand_dims: tuple[int, ...], index_dims: tuple[int, ...]) -> dict[int, int]:
    return {int(a): int(b) for a, b in zip(operand_dims, index_dims, strict=True)}


def _of_lookup(op: Op, indices: Batched, looked_up: list[int]) -> State:
    """The batch of the indices is among the dimensions of the result that are no windows, in order."""
    if indices.dim >= len(looked_up):
        return op.undecided("the batch lies along the components of an index")
    return Batched(looked_up[indices.dim], indices.outer, indices.inner)


def _by_position(op: Op, indices: Batched, index_map: tuple[int, ...], operand: Batched) -> bool:
    """Whether the batch of `operand` is indexed by the positions of the elements, and by nothing else."""
    if operand.dim not in index_map or (operand.outer, operand.inner) != (1, 1):
        return False
    column, last = index_map.index(operand.dim), len(op.ins[1]) - 1
    if indices.fact == "position":
        return len(index_map) == 1 and indices.dim != last
    return isinstance(indices.fact, tuple) and indices.fact == (last, frozenset({column}))


def scatter(op: Op, operand: State, indices: State, updates: State) -> State:
    """As `gather`, of which it is the reverse."""
    numbers = op.params["dimension_numbers"]
    windows, inserted = tuple(numbers.update_window_dims), tuple(numbers.inserted_window_dims)
    paired = _pairs(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims)
    index_map = tuple(numbers.scatter_dims_to_operand_dims)
    written = [i for i in range(len(op.ins[2])) if i not in windows]
    if not isinstance(operand, Batched):
        if isinstance(updates, Batched) or isinstance(indices, Batched):
            return op.dependent("elements of the batch are written into one array")
        return op.undecided("it writes in a way that is not known")
    if not (operand.plain and isinstance(updates, Batched) and updates.plain):
        return op.undecided("it writes in a way that is not known")
    if isinstance(indices, Shared):
        dim = operand.dim
        if dim in (*inserted, *paired, *index_map):
            return op.dependent("some elements of the batch are picked by their position")
        kept = [i for i in range(len(op.ins[0])) if i not in inserted and i not in paired]
        place = windows[kept.index(dim)]
        if updates.dim != place or op.ins[0][dim] != op.ins[2][place]:
            return op.undecided("it writes to some elements of the batch")
        return op.combine((operand, updates.at(dim)))
    if isinstance(indices, Batched) and indices.dim < len(written):
        by_position = _by_position(op, indices, index_map, operand)
        if paired.get(operand.dim) == indices.dim or (by_position and operand.dim in inserted):
            if not indices.plain and not by_position:
                return op.positional()
            if updates.dim != written[indices.dim]:
                return op.undecided("it writes in a way that is not known")
            return op.combine((operand, updates.at(operand.dim), Batched(operand.dim, indices.outer, indices.inner)))
    return op.undecided("it writes to the batch at places that are not known")


INDEXING = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter-add", "scatter_mul", "scatter-mul", "scatter_min",
                     "scatter-min", "scatter_max", "scatter-max", "scatter_sub", "scatter-sub"), scatter),
}  # fmt: skip
"""The rules of these primitives; those of dynamic slices also take a start that is `Mixed`."""
