"""Run a whole plan in one call."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xtrax.tiling._execute.args import Bound, bind, check_axes, check_key, check_plan, check_sizes
from xtrax.tiling._execute.arrays import HeldArrays, held_arrays
from xtrax.tiling._execute.axes import Axis, Nest, Result, run_nest
from xtrax.tiling._execute.bucket import Batch, batches, check_ragged, fused, length_axes, take_items
from xtrax.tiling._execute.effects import fires
from xtrax.tiling._execute.hooks import NO_HOOK, AxisHook
from xtrax.tiling._execute.lanes import Operand
from xtrax.tiling._execute.mesh import check_mesh, run_on_mesh
from xtrax.tiling._execute.program import run_program
from xtrax.tiling._plan.batch_plan import BatchPlan
from xtrax.tiling._plan.spec import AxisDecision
from xtrax.tiling.strategy import Bucket, Scan, Vmap

__all__ = ["execute_plan"]


def execute_plan(
    fn: Callable[..., Any] | None,
    plan: BatchPlan,
    *args: Any,
    axes: Sequence[Sequence[str] | None] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    key: jax.Array | None = None,
) -> Any:
    """Run a function of one element over all axes of a plan.

    The axes nest in the order of the plan, the first outermost, and the results carry them in that order. Arguments
    that share an axis are mapped together along it; axes that no argument shares form the outer product. Each axis runs
    as its strategy says, all of them in one program:

    - `Vmap` all elements at once, `SafeMap` in chunks of at most its `batch_size` (balanced, the first two overlapping
      where they do not come out even, so `fn` should be pure; where it has side effects each element is computed once);
    - `DedupGather` only the distinct elements, at once or in chunks of its `batch_size`, whose results are handed out;
    - `Scan` one element after another: a step computes what is inside the axis, `y`, and then
      `carry, out = transition(carry, y)`, for each element of the axes outside from its own first carry. The axis
      yields the stack of `out`, or None with `collect_outputs=False`;
    - `Bucket`, which must be outermost, on the host: its arguments are lists of pytrees of arrays `(length, ...)`,
      which are padded with zeros to their bucket, `batch_size` elements of one bucket at a time. `fn` also gets, last
      of the arguments, the `(bucket,)` bool mask of what is no padding. The axis yields a list with an entry for each
      element, of numpy arrays, cut to its length where an axis of an output is as long as the bucket; carries are lists
      too.

    Outside a trace the call is compiled, once for each function, plan and types of arguments; arrays that `fn` holds or
    closes over are arguments of the program, never constants in it. It is traced anew when a variable that `fn` or a
    transition closes over was replaced, but, as with `jax.jit`, not when something inside of an object was changed.
    Inside `jax.jit`, `jax.grad`, `jax.vmap` and the like it is part of that trace.

    Args:
        fn: a function of one element of each argument, in order; with `key`, also of the keyword `key`. An argument
            without axes is given whole. None stands for the elements themselves: the argument's, or the tuple of them.
        plan: from `BatchPlanner.plan`, or made of `AxisDecision` objects.
        *args: pytrees of arrays. Leaves that are no arrays, of arguments without axes, are passed on as they are.
        axes: for each argument the names of its leading dimensions, the outermost first, or None if it has none of the
            plan's axes. None, if the plan has one axis, which every argument then has.
        mesh: devices over which the outermost axis, no Scan, is split, over all axes of the mesh together. It is padded
            to a multiple of them, so `fn` must have no side effects, but for unordered `jax.debug.print` and
            `jax.debug.callback`, which may show the last element more than once.
        key: a PRNG key. The element with the indices `(i_1, ..., i_d)` in the plan's axes gets `jax.random.fold_in(key,
            i)`, where i is its row-major index `(...(i_1 * n_2 + i_2)... * n_d) + i_d`, whatever runs it where.

    Returns:
        What `fn` returns, each leaf with the plan's axes in front, in plan order. If the plan has Scan axes, the pair
        of that and the last carries: a dict from axis name to carry, each with the axes outside its own in front.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: axes that are unknown, repeated or missing, an argument whose size is not the planned one, a plan
            without axes, or a `key` together with a `DedupGather` or with `fn=None`.
        DispatchRejected: a `WhileCarry`, a `Bucket` that is not outermost, a `Scan` on a heterogeneous axis or as the
            axis that is split over a mesh, an `fn` with side effects on a `DedupGather` axis or over a mesh, or effects
            at an axis inside a `DedupGather` whose distinct elements are computed in chunks.
        CarryMismatchError: a transition changes its carry's structure, shapes or dtypes.

    >>> import jax.numpy as jnp
    >>> from xtrax.tiling import AxisSpec, BatchPlanner, CarrySpec
    >>> decay = CarrySpec("time", jnp.float32(0), lambda carry, y: (carry / 2 + y, carry / 2 + y))
    >>> batch, time = AxisSpec("batch", 4, default_batch_size=2), AxisSpec("time", 2, default_batch_size=2)
    >>> plan = BatchPlanner(carry_specs=[decay]).plan([batch, time])
    >>> xs, gain = jnp.ones((4, 2)), jnp.arange(4.0)
    >>> outputs, carries = execute_plan(lambda x, g: g * x, plan, xs, gain, axes=[("batch", "time"), ("batch",)])
    >>> outputs.tolist(), carries["time"].tolist()
    ([[0.0, 0.0], [1.0, 1.5], [2.0, 3.0], [3.0, 4.5]], [0.0, 1.5, 3.0, 4.5])
    """
    return _run_plan(fn, plan, args, axes, mesh, key, {})


def _run_plan(
    fn: Callable[..., Any] | None,
    plan: BatchPlan,
    args: Sequence[Any],
    axes: Any,
    mesh: Any,
    key: Any,
    hooks: Mapping[str, AxisHook],
) -> Any:
    """`execute_plan` with something at the edges of axes; `xtrax.tiling._execute.hooks` says what."""
    decisions = check_plan(fn, plan)
    names = check_axes(decisions, args, axes)
    key = check_key(fn, decisions, key)
    check_mesh(mesh, decisions[0])
    for decision in decisions:
        reducer = hooks.get(decision.spec.name, NO_HOOK).streamed
        if reducer is not None:
            reducer.check_size(decision.spec.cardinality, f"axis {decision.spec.name!r}")
    if isinstance(decisions[0].strategy, Bucket):
        outputs, carries = _run_buckets(fn, decisions, args, names, mesh, key, hooks)
    else:
        check_sizes(decisions, args, names)
        outputs, carries = _run_on_device(fn, decisions, args, names, mesh, key, hooks)
    return (outputs, carries) if any(isinstance(d.strategy, Scan) for d in decisions) else outputs


def _run_on_device(
    fn: Any,
    decisions: Sequence[AxisDecision],
    args: Sequence[Any],
    names: Sequence[tuple[str, ...]],
    mesh: Any,
    key: Any,
    hooks: Mapping[str, AxisHook],
    numbers: Any = None,
) -> tuple[Any, dict[str, Any]]:
    """The outputs and carries; `numbers` are those of the elements of the outermost axis, if not 0, 1, 2, and so on."""
    bound = bind(fn, args, names, key)
    held = [held_arrays(d.strategy) if mesh is None else None for d in decisions]
    run = _device_run(bound, decisions, mesh, hooks, held, numbers is not None)
    identity = tuple(
        (d.spec.name, d.spec.cardinality, d.strategy if own is None else own.kind, hooks.get(d.spec.name, NO_HOOK))
        for d, own in zip(decisions, held, strict=True)
    )
    program = None if bound.signature is None else (bound.signature, identity, mesh, numbers is not None)
    called: list[Any] = [value for d in decisions for value in vars(d.strategy).values() if callable(value)]
    called += [hooks[d.spec.name] for d in decisions if d.spec.name in hooks]
    arrays = [*bound.arrays, *(array for own in held if own is not None for array in own.arrays)]
    return run_program(fn, program, run, [*arrays, *([] if numbers is None else [numbers])], called)


def _run_buckets(
    fn: Any,
    decisions: Sequence[AxisDecision],
    args: Sequence[Any],
    names: Sequence[tuple[str, ...]],
    mesh: Any,
    key: Any,
    hooks: Mapping[str, AxisHook],
) -> tuple[Any, dict[str, Any]]:
    """A plan whose outermost axis is a Bucket: each batch of equal bucket runs it as a Vmap axis of its own."""
    if fn is None:
        raise ValueError("fn is None, and a Bucket axis gives it the padded elements and their mask; pass a function.")
    axis, inside = decisions[0], decisions[1:]
    name = axis.spec.name
    lengths = check_ragged(axis, args, names)
    ragged = [i for i, entry in enumerate(names) if name in entry]
    check_sizes(inside, args, [() if i in ragged else entry for i, entry in enumerate(names)])
    boundaries: Any = axis.strategy.boundaries  # ty: ignore[missing-union-attribute]
    hook = hooks.get(name, NO_HOOK)
    hooks = {**hooks, name: AxisHook(emit=hook.emit, keeps=hook.stacks or hook.streamed is not None)}

    def of_batch(args: Sequence[Any], mask: Any, numbers: Any) -> tuple[Any, dict[str, Any]]:
        spec = dataclasses.replace(axis.spec, cardinality=len(numbers), heterogeneous=False, bucket_boundaries=None)
        batch = dataclasses.replace(axis, spec=spec, strategy=Vmap())
        every = (*args, mask)
        return _run_on_device(fn, (batch, *inside), every, (*names, (name,)), mesh, key, hooks, numbers)

    def abstractly(batch: Batch) -> Callable[[int], Any]:
        def of_length(length: int) -> Any:
            ragged_args = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((x.shape[0], length, *x.shape[2:]), x.dtype), (batch.args, batch.mask)
            )
            return jax.eval_shape(
                lambda parts: of_batch([parts[0].get(i, arg) for i, arg in enumerate(args)], parts[1], batch.numbers),
                ragged_args,
            )

        return of_length

    outputs: list[Any] = [None] * len(lengths)
    carries: list[Any] = [None] * len(lengths)
    cuts: dict[int, Any] = {}
    for batch in batches(axis, args, names, lengths):
        if batch.bucket not in cuts:
            cuts[batch.bucket] = length_axes(abstractly(batch), batch.bucket, boundaries)
        result = of_batch([batch.args.get(i, arg) for i, arg in enumerate(args)], batch.mask, batch.numbers)
        taken = take_items(result, cuts[batch.bucket], [lengths[i] for i in batch.items])
        for i, (output, carry) in zip(batch.items, taken, strict=True):
            outputs[i], carries[i] = output, carry
    scans = [d.spec.name for d in inside if isinstance(d.strategy, Scan)]
    return fused(hook, name, outputs), {scan: [carry[scan] for carry in carries] for scan in scans}


def _device_run(
    bound: Bound,
    decisions: Sequence[AxisDecision],
    mesh: jax.sharding.Mesh | None,
    hooks: Mapping[str, AxisHook],
    held: Sequence[HeldArrays | None],
    given_numbers: bool,
) -> Callable[[list[Any]], tuple[Any, dict[str, Any]]]:
    """The function from the arrays, and perhaps the numbers of the outermost elements, to the outputs and carries."""
    sizes = [decision.spec.cardinality for decision in decisions]
    strides = [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]
    of_plan = tuple(Axis(d.spec.name, d.strategy, hooks.get(d.spec.name, NO_HOOK)) for d in decisions)
    effects = any(axis.hook.emit is not None for axis in of_plan)
    padded = given_numbers or (mesh is not None and (effects or of_plan[0].hook.streamed is not None))
    numbered = bound.has_key or effects or padded
    first = len(bound.arrays)
    positions = tuple(range(first, first + len(of_plan))) if numbered else ()

    def call(values: Sequence[Any]) -> Any:
        index = None
        if bound.has_key:
            terms = [values[at].astype(jnp.uint32) * jnp.uint32(s) for at, s in zip(positions, strides, strict=True)]
            index = sum(terms[1:], terms[0])
        return bound.call(values[:first], index)

    def run(arrays: list[Any]) -> tuple[Any, dict[str, Any]]:
        operands = [Operand(jnp.asarray(array), dims) for array, dims in zip(arrays[:first], bound.dims, strict=True)]
        at, axes = first, list(of_plan)
        for k, own in enumerate(held):
            if own is not None:
                part, at = arrays[at : at + len(own.arrays)], at + len(own.arrays)
                axes[k] = dataclasses.replace(axes[k], strategy=own.strategy_with(part))
        if numbered:
            numbers = [jnp.arange(size, dtype=jnp.int32) for size in sizes]
            numbers[:1] = arrays[at:] or numbers[:1]
            operands += [Operand(x, (axis.name,)) for x, axis in zip(numbers, axes, strict=True)]
        nest = Nest(tuple(axes), call, bound.groups, positions, padded)
        nest = dataclasses.replace(nest, fires=fires(nest, operands, split=mesh is not None))
        return _tied(run_nest(nest, operands) if mesh is None else run_on_mesh(nest, operands, mesh))

    return run


def _tied(result: Result) -> tuple[Any, dict[str, Any]]:
    """The outputs and carries, which need the token of the effects, so that a derivative does not lose these."""
    if result.token is None:
        return result.values, result.carries
    (values, carries), _ = lax.optimization_barrier(((result.values, result.carries), result.token))
    return values, carries
