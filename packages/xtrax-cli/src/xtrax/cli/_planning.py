"""From a function and shapes to a plan: its axes, the program at each chunk size, and what that takes."""

import dataclasses
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from xtrax.cli._call import Call, abstract_call
from xtrax.cli._errors import CLIError, tell
from xtrax.cli._plan_request import DEVICE, PlanRequest
from xtrax.inference import infer_bundle
from xtrax.tiling import AxisDecision, AxisRole, AxisSpec, BatchPlan, BatchPlanner, MemoryBudget, RemainderWarning
from xtrax.tiling.errors import BudgetInfeasibleError
from xtrax.tiling.estimators import device_memory_budget, lowered_memory_estimate

_Sizes = Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Planned:
    """A plan, and what it is a plan of.

    Attributes:
        plan: The plan.
        inputs: From argument, dotted for what is in a dict, to `dtype[shape]`.
        outputs: From output to `dtype[shape]`.
        notes: What was assumed, in sentences.
        infeasible: Why the plan does not fit its budget, or None.
    """

    plan: BatchPlan
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    notes: tuple[str, ...]
    infeasible: str | None


def make_plan(request: PlanRequest) -> Planned:
    """Plan what was asked for.

    Raises:
        CLIError: If the function cannot be imported, fails for the shapes, or cannot be planned.
    """
    call = abstract_call(request.fn, request.shapes)
    subject = _Batched(call) if request.axes is None else _PerElement(call, request.axes)
    notes = list(subject.notes)
    specs, chosen = [], []
    for spec in subject.specs:
        if request.batch_size is not None:
            spec = dataclasses.replace(spec, default_batch_size=request.batch_size)
        elif spec.role is AxisRole.UNKNOWN:
            chosen.append(len(specs))
        specs.append(dataclasses.replace(spec, role=AxisRole.KNOWN))
    infeasible = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RemainderWarning)  # the reasoning says so
            if request.budget is None:
                plan = BatchPlanner().plan(specs)
            else:
                budget = device_memory_budget() if request.budget == DEVICE else int(request.budget)
                plan, infeasible = _within(budget, specs, chosen, subject)
    except CLIError:
        raise
    except (ValueError, RuntimeError) as error:
        raise CLIError(f"{request.fn}: {error}") from error
    inputs = dict(zip(call.names, call.args, strict=True)) | dict(call.kwargs)
    return Planned(plan, _described(inputs), _described(subject.outputs), tuple(notes), infeasible)


def _within(
    budget: int, specs: list[AxisSpec], chosen: list[int], subject: "_Batched | _PerElement"
) -> tuple[BatchPlan, str | None]:
    """The plan, and why it does not fit if it does not.

    The axes of `chosen` get the largest chunks that fit, the others, once they are demoted, their batch sizes.
    """
    solve = [specs[i].name for i in chosen]
    try:
        return BatchPlanner(budget=MemoryBudget(budget, _Estimate(subject), solve)).plan(specs), None
    except BudgetInfeasibleError as error:
        # What to do about it is told in the words of the command line.
        infeasible = re.split(r" (?:Lower a default_batch_size, or raise|Raise) the budget;", str(error))[0]
        lower = any(d.batch_size > 1 for d in error.plan.decisions)
        return error.plan, f"{infeasible} {'Lower --batch-size, or raise' if lower else 'Raise'} --budget."


class _Estimate:
    """`decisions -> bytes` by the compiler's account of the program at these chunk sizes.

    Chunks need, besides their own arguments, outputs and temporaries, the arguments and outputs of all elements.
    """

    def __init__(self, subject: "_Batched | _PerElement") -> None:
        self.subject = subject
        self.known: dict[tuple[int, ...], int] = {}
        self.whole = sum(_nbytes(leaf) for leaf in jax.tree.leaves((subject.call.args, subject.call.kwargs)))
        self.whole += sum(_nbytes(leaf) for leaf in jax.tree.leaves(subject.outputs))

    @property
    def compiles(self) -> int:
        return len(self.known)

    def __call__(self, decisions: tuple[AxisDecision, ...]) -> int:
        sizes = {d.spec.name: max(1, min(d.batch_size, d.spec.cardinality)) for d in decisions}
        key = tuple(sizes.values())
        if key not in self.known:
            fn, args = self.subject.at(sizes)
            try:
                self.known[key] = lowered_memory_estimate(fn, *args)
            except Exception as error:
                told = ", ".join(f"{size} of {name}" for name, size in sizes.items())
                raise CLIError(f"{self.subject.call.path} fails for {told} at once: {tell(error)}") from error
        chunked = any(sizes[d.spec.name] < d.spec.cardinality for d in decisions)
        return self.known[key] + (self.whole if chunked else 0)


class _Batched:
    """A function of a batch: its axes are the leading ones of its arguments."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.outputs = call.output()
        inputs: Any = list(call.args)
        if call.kwargs:
            inputs = dict(zip(call.names, call.args, strict=True)) | dict(call.kwargs)
        try:
            _, self.specs = infer_bundle(call.fn, inputs)
        except (TypeError, ValueError) as error:
            raise CLIError(f"{call.path}: {error}") from error
        self.notes = _notes(self.specs)

    def at(self, sizes: _Sizes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function, and its arguments with so many elements of each axis."""
        leaves, treedef = jax.tree.flatten((self.call.args, dict(self.call.kwargs)))
        names = iter(self._axis_of_leaves([leaf for leaf in leaves if leaf.shape]))
        cut = [_resized(leaf, (sizes[next(names)],)) if leaf.shape else leaf for leaf in leaves]
        return lambda args, kwargs: self.call.fn(*args, **kwargs), jax.tree.unflatten(treedef, cut)

    def _axis_of_leaves(self, leaves: list[Any]) -> list[str]:
        """The axis of each leaf that has one, by its position where it has no name, else by its size."""
        names = [spec.name for spec in self.specs]
        found = []
        for i, leaf in enumerate(leaves):
            fits = [spec.name for spec in self.specs if spec.cardinality == leaf.shape[0]]
            if f"axis_{i}" in names:
                found.append(f"axis_{i}")
            elif len(fits) == 1 or len(names) == 1:
                found.append(fits[0] if fits else names[0])
            else:
                raise CLIError(
                    f"{self.call.path}: {' and '.join(fits) or 'the axes'} cannot be told apart by their sizes, so the "
                    "memory of a chunk is not known; give them sizes that differ, or leave out --budget"
                )
        return found


class _PerElement:
    """A function of one element, mapped over the axes that its arguments have in front."""

    def __init__(self, call: Call, axes: Mapping[str, tuple[str, ...]]) -> None:
        self.call = call
        self.axes = [axes.get(name, ()) for name in (*call.names, *call.kwargs)]
        self.args = (*call.args, *call.kwargs.values())
        sizes: dict[str, int] = {}
        for names, arg in zip(self.axes, self.args, strict=True):
            for leaf in jax.tree.leaves(arg):
                sizes |= dict(zip(names, leaf.shape, strict=False))
        self.sizes = sizes
        self.specs = [
            AxisSpec(name, size, default_batch_size=max(size, 1), role=AxisRole.UNKNOWN) for name, size in sizes.items()
        ]
        self.notes: tuple[str, ...] = ()
        fn, args = self.at(sizes)
        self.outputs = call.trace(lambda: jax.eval_shape(fn, *args))

    def at(self, sizes: _Sizes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function mapped over every axis, and its arguments with so many elements of each."""
        fn = self._of_all
        for name in reversed(self.sizes):
            fn = jax.vmap(fn, in_axes=tuple(0 if name in names else None for names in self.axes))
        args = tuple(
            jax.tree.map(lambda leaf, names=names: _resized(leaf, tuple(sizes[name] for name in names)), arg)
            for names, arg in zip(self.axes, self.args, strict=True)
        )
        return fn, args

    def _of_all(self, *args: Any) -> Any:
        count = len(self.call.args)
        return self.call.fn(*args[:count], **dict(zip(self.call.kwargs, args[count:], strict=True)))


def _notes(specs: list[AxisSpec]) -> tuple[str, ...]:
    """What is assumed of the axes that nothing was said about."""
    unknown = [spec for spec in specs if spec.role is AxisRole.UNKNOWN]
    if not unknown:
        return ()
    named = ", ".join(spec.name for spec in unknown)
    notes = [f"nothing says that the elements of {named} are independent; this plan assumes it: say so by @axis_config"]
    for size in sorted({spec.cardinality for spec in unknown}):
        same = [spec.name for spec in unknown if spec.cardinality == size]
        if len(same) > 1:
            notes.append(
                f"{' and '.join(same)} have {size} elements each and are planned as axes of their own; if they are "
                "one axis, give it one name by @axis_config or jaxtyping"
            )
    return tuple(notes)


def _resized(leaf: Any, leading: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*leading, *leaf.shape[len(leading) :]), leaf.dtype)


def _nbytes(leaf: Any) -> int:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def _described(tree: Any) -> dict[str, str]:
    """From the path of each leaf to its dtype and shape."""
    described: dict[str, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "output"
        described[name] = f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
    return described
