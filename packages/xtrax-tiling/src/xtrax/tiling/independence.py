"""Are the elements of a batch independent in a function of the batch?

Only then is a chunk of the batch, given to the function alone, worth the same as that part of the whole.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from xtrax.tiling._check import check_callable
from xtrax.tiling._dependence.follow import follow
from xtrax.tiling._dependence.inputs import BatchInputs
from xtrax.tiling._dependence.perturb import moved_output
from xtrax.tiling._dependence.state import Batched, Cause, Mixed, State, user_line


@dataclasses.dataclass(frozen=True)
class IndependenceReport:
    """What `check_independence` found.

    Args:
        verdict: "independent": element i of every output is a function of element i of the inputs alone, the same for
            every i and every batch size; proven. "dependent": it is not. "undecided": neither was found, or values are
            independent but the derivative that a `jax.custom_vjp` or `jax.custom_jvp` function brings along may not be,
            such as one that clips.
        method: "jaxpr" if the operations of the traced function gave the verdict; "perturbation" if the function was
            run with one element changed. A perturbation can refute independence, and never proves it.
        reason: one sentence that says why.
        operation: the primitive where elements first meet, or that could not be followed; None if there is none.
        source: its line in the user's code, "file.py:12 (function)"; None if not known.
        output: the first output leaf concerned, such as "out['loss']"; None if independent.
        out_axes: for an independent function, the tree of its outputs, each leaf the axis along which its elements
            lie, or None for an output that is the same for every batch; else None.
    """

    verdict: Literal["independent", "dependent", "undecided"]
    method: Literal["jaxpr", "perturbation"]
    reason: str
    operation: str | None = None
    source: str | None = None
    output: str | None = None
    out_axes: Any = None

    def __str__(self) -> str:
        """The verdict, the operation, its line and the reason."""
        where = f" at {self.source}" if self.source else ""
        what = f" by {self.operation}{where}" if self.operation else where
        output = f" in {self.output}" if self.output else ""
        return f"{self.verdict}{output}{what}: {self.reason}"


def check_independence(fn: Callable[..., Any], inputs: Any, axis: Any = 0) -> IndependenceReport:
    """Whether element i of what a function of a batch returns depends on element i of its inputs alone.

    The function is traced at two batch sizes and the batch is followed through both programs, operation by operation,
    loops and branches included. Where an operation cannot be followed and the inputs are arrays, the function is run
    with one element changed, which can show that others move. Constants that depend on the batch size, random numbers
    drawn for the whole batch from one key, and arrays with an entry per position count as dependence, since a chunk
    would meet others. The backward pass of a `jax.custom_vjp` function is followed too: in chunks, it must give each
    element its own gradient, and what they share a sum over the elements. Branches that Python takes by the batch size
    are seen at the two sizes only.

    Args:
        fn: a pure function of a batch.
        inputs: its arguments as a tuple or list, or its only argument: pytrees of arrays or `jax.ShapeDtypeStruct`.
        axis: where the elements lie in the inputs: an int, None for what is shared, or a pytree prefix, as the
            `in_axes` of `jax.vmap`. For a tuple or list of arguments, a tuple or list has one entry for each.

    Returns:
        The verdict, the operation that decided it, its line, and the axes of the outputs.

    Raises:
        TypeError: `fn` is not callable; an axis is neither int nor None; an input along an axis is no array.
        ValueError: an axis that an input lacks, sizes that differ, or no input with an axis.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 3), jnp.float32)
    >>> check_independence(lambda x: jax.nn.softmax(x, axis=1), x).verdict
    'independent'
    >>> report = check_independence(lambda x: x - x.mean(0), x)
    >>> report.verdict, report.operation
    ('dependent', 'reduce_sum')
    """
    check_callable("fn", fn, "fn(*inputs)")
    several = isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields")
    args = tuple(inputs) if several else (inputs,)
    axes = tuple(axis) if several and isinstance(axis, (tuple, list)) else axis if several else (axis,)
    roots = [f"inputs[{i}]" for i in range(len(args))] if several else ["inputs"]
    batch = BatchInputs.of(args, axes, roots, "axis")
    report, causes = analyse(fn, batch)
    if report.verdict != "undecided" or causes is None or not batch.concrete:
        return report
    found = moved_output(batch.runner(fn), batch.mapped, batch.mapped_axes, batch.size, causes.axes)
    if found is None:
        reason = f"{report.reason}; changing single elements moved no other, which does not prove that none ever would"
        return dataclasses.replace(report, reason=reason)
    leaf, how = found
    return dataclasses.replace(
        report, verdict="dependent", method="perturbation", reason=how, output=causes.names[leaf], out_axes=None
    )


@dataclasses.dataclass(frozen=True)
class Outputs:
    """The names of the output leaves, and the axis along which the batch seems to lie in each."""

    names: list[str]
    axes: list[int | None]


def analyse(
    fn: Callable[..., Any], batch: BatchInputs, other_size: int | None = None
) -> tuple[IndependenceReport, Outputs | None]:
    """Decide from the programs at two batch sizes.

    Args:
        fn: a function of the arguments of `batch`.
        batch: them.
        other_size: the second size, if it is at least 2 and not the first; else one more than the first.

    Returns:
        The report, and what is known of the outputs; None if running the function would tell no more.
    """
    run = batch.runner(fn)
    if batch.size < 2:
        jax.make_jaxpr(run)(*batch.types(batch.size))  # what it raises is the caller's own error
    first = max(batch.size, 2)
    second = other_size if other_size is not None and other_size >= 2 and other_size != first else first + 1
    sizes = (first, second)
    programs = []
    for size in sizes:
        try:
            program, shape = jax.make_jaxpr(run, return_shape=True)(*batch.types(size))
        except Exception as error:
            # What fn raises at a size that it was not given is the finding.
            if size == batch.size:
                raise
            return _fails(error, batch.size, size), None
        programs.append((program, shape))
    (program, shapes), (other, _) = programs
    named = jax.tree_util.tree_flatten_with_path(shapes)[0]
    names = ["out" + jax.tree_util.keystr(path) for path, _ in named]
    states = follow(program, other, batch.states(), sizes)
    outputs = Outputs(names, [_batch_axis(a.aval.shape, b.aval.shape) for a, b in _outvars(program, other)])
    effects = getattr(program, "effects", None)
    return _report(states, names, jax.tree.structure(shapes), effects), None if effects else outputs


def _outvars(program: Any, other: Any) -> list[tuple[Any, Any]]:
    one, two = getattr(program, "jaxpr", program).outvars, getattr(other, "jaxpr", other).outvars
    return list(zip(one, two, strict=False))


def _batch_axis(shape: tuple[int, ...], other: tuple[int, ...]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b), None)


def _report(states: Sequence[State], names: list[str], treedef: Any, effects: Any) -> IndependenceReport:
    """One verdict for all outputs."""
    found = [(name, cause) for name, state in zip(names, states, strict=True) if (cause := _cause(state))]
    if found:
        name, cause = min(found, key=lambda entry: entry[1].kind == "undecided")
        return IndependenceReport(cause.kind, "jaxpr", cause.detail, cause.operation, cause.source, name)
    if effects:
        reason = f"it has effects ({', '.join(sorted(map(str, effects)))}), which may be once for the whole batch"
        return IndependenceReport("undecided", "jaxpr", reason, "effects")
    axes = [state.dim if isinstance(state, Batched) else None for state in states]
    reason = "no operation combines elements, or depends on their positions or on the size of the batch"
    return IndependenceReport("independent", "jaxpr", reason, out_axes=jax.tree.unflatten(treedef, axes))


def _cause(state: State) -> Cause | None:
    """Why an output is not one of independent elements."""
    if isinstance(state, Mixed):
        return state.cause
    if not isinstance(state, Batched):
        return None
    if not state.plain:
        return Cause("dependent", "iota", None, "it holds the positions of the elements within the batch")
    if (state.outer, state.inner) != (1, 1):
        detail = f"it holds several entries for each element along its axis {state.dim}; reshape it to one"
        return Cause("undecided", "reshape", None, detail)
    return None


def _fails(error: Exception, size: int, other: int) -> IndependenceReport:
    """What to say of a function that runs at one size only."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append((code.co_filename, traceback.tb_lineno, code.co_name))
        traceback = traceback.tb_next
    text = str(error).strip().split("\n")[0]
    reason = f"it runs on a batch of {size} but not on one of {other}: {type(error).__name__}: {text}"
    return IndependenceReport("dependent", "jaxpr", reason, source=user_line(reversed(frames)))
