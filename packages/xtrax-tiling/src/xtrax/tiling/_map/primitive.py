"""The loop over chunks as a JAX primitive, so that each of its transformations is a loop over chunks again.

A plain `fori_loop` that writes chunks into a buffer is the cheapest map there is, but transposes badly: each slice of a
loop-invariant array becomes the addition of a whole array in each step. Here the derivative of a map is a map of the
chunk's derivative, and the transpose of a map is a map of the chunk's transpose, so every loop touches one chunk at a
time.

Chunks overlap where they do not come out even: the first two share elements. What is written row by row is right
nonetheless, as the second chunk overwrites it. What is summed over chunks must count each element once: every such sum
arises from a transpose, and is linear in cotangents of rows, which are zeroed in the first chunk where it is to be
overwritten (`In.masked`). Derivatives of such sums are linear in masked operands too, so the rule holds for all orders.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from xtrax.tiling._jax_internals import depends, evaluate, named_axes, side_effects, trace, without_tangent
from xtrax.tiling._map.layout import Chunks
from xtrax.tiling._map.loop import In, Kind, Out, Spec, chunk_types, run_loop
from xtrax.tiling._same_jaxpr import content

map_p = Primitive("chunked_map")
map_p.multiple_results = True


def bind(spec: Spec, operands: Sequence[Any]) -> list[Any]:
    """Run the loop: rows come along the axis that `spec.outs` gives them."""
    return map_p.bind(*operands, **vars(spec))


_jitted_loop = jax.jit(run_loop, static_argnames="spec", inline=True)


def _impl(*operands: Any, spec: Spec) -> list[Any]:
    return list(_jitted_loop(*operands, spec=_first_like(spec)))


def _first_like(spec: Spec) -> Spec:
    """The first loop that computed the same: a derivative that is taken anew need not be compiled anew."""
    try:
        # What is run is not differentiated any more.
        parts = vars(spec).values()
        key = tuple(content(part, rules=False) if isinstance(part, ClosedJaxpr) else part for part in parts)
        known = _known(key)
    except TypeError:
        return spec
    if not known:
        known.append(spec)
    return known[0]


@functools.lru_cache(maxsize=256)
def _known(key: Hashable) -> list[Spec]:
    """An empty list, and at the next call what has been put into it since."""
    del key
    return []


def _abstract_eval(*avals: Any, spec: Spec) -> tuple[list[Any], Any]:
    looped = trace(lambda *operands: run_loop(*operands, spec=spec), avals)
    return looped.out_avals, looped.effects


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, spec: Spec) -> tuple[list[Any], list[Any]]:
    active = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero and not without_tangent(primals[i])]
    moved = depends(spec.jaxpr, [i in active for i in range(len(primals))])
    moving = [
        i for i, (aval, flag) in enumerate(zip(spec.jaxpr.out_avals, moved, strict=True))
        if flag and not without_tangent(aval)
    ]  # fmt: skip
    dots = [tangents[i] for i in active]
    # These are the tangents that reverse mode passes to a jvp rule. Anywhere else nothing would be gained by keeping
    # the intermediate values of all chunks, so there a tangent map computes those of one chunk at a time.
    reverse = any(isinstance(dot, pe.JaxprTracer) for dot in dots)
    if not moving:
        outs, moved_dots = bind(spec, primals), []
    elif reverse and not spec.remat:
        outs, moved_dots = _linearize(spec, primals, dots, active, moving)
    elif side_effects(spec.jaxpr):
        if reverse:
            raise ValueError(
                "fn has side effects, and is differentiated in reverse mode with remat=True (or grad_batch_size), "
                "which computes each chunk anew and would repeat them; leave out remat, or take the side effects (a "
                "HostTap, an io_callback) out of fn and record in a separate forward pass."
            )
        outs, moved_dots = _differentiate_at_once(spec, primals, dots, active, moving)
    else:
        outs, moved_dots = bind(spec, primals), bind(_tangent_spec(spec, active, moving), [*primals, *dots])
    out_dots: list[Any] = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in outs]
    for i, dot in zip(moving, moved_dots, strict=True):
        out_dots[i] = dot
    return outs, out_dots


def _pushed(jaxpr: ClosedJaxpr, active: list[int]) -> Callable[..., tuple[Any, Any]]:
    """The chunk's jvp: of its operands and then the tangents of the active ones."""
    fn, n = jaxpr_as_fun(jaxpr), len(jaxpr.in_avals)

    def pushed(*args: Any) -> tuple[Any, Any]:
        primals, dots = list(args[:n]), args[n:]
        return jax.jvp(_restricted(fn, primals, active), [primals[i] for i in active], list(dots))

    return pushed


def _restricted(fn: Callable[..., Any], primals: list[Any], active: list[int]) -> Callable[..., list[Any]]:
    """`fn` as a function of some of its arguments."""

    def restricted(*values: Any) -> list[Any]:
        merged = list(primals)
        for i, value in zip(active, values, strict=True):
            merged[i] = value
        return list(fn(*merged))

    return restricted


def _tangent_types(jaxpr: ClosedJaxpr, active: list[int]) -> list[Any]:
    return [jaxpr.in_avals[i].to_tangent_aval() for i in active]


def _tangent_spec(spec: Spec, active: list[int], moving: list[int]) -> Spec:
    """The map of the tangents alone, which computes the values that it needs of a chunk anew."""

    def tangent(jaxpr: ClosedJaxpr) -> ClosedJaxpr:
        def dots(*args: Any) -> list[Any]:
            outs = _pushed(jaxpr, active)(*args)[1]
            return [outs[i] for i in moving]

        return trace(dots, [*jaxpr.in_avals, *_tangent_types(jaxpr, active)])

    return dataclasses.replace(
        spec,
        jaxpr=tangent(spec.jaxpr),
        ins=(*spec.ins, *(spec.ins[i] for i in active)),
        outs=tuple(spec.outs[i] for i in moving),
        grad_jaxpr=spec.grad_jaxpr and tangent(spec.grad_jaxpr),
    )


def _differentiate_at_once(
    spec: Spec, primals: Sequence[Any], dots: Sequence[Any], active: list[int], moving: list[int]
) -> tuple[list[Any], list[Any]]:
    """Values and tangents in one map, so that the effects of a chunk happen once."""

    def both(*args: Any) -> list[Any]:
        outs, out_dots = _pushed(spec.jaxpr, active)(*args)
        return [*outs, *(out_dots[i] for i in moving)]

    jaxpr = trace(both, [*spec.jaxpr.in_avals, *_tangent_types(spec.jaxpr, active)])
    ins = (*spec.ins, *(spec.ins[i] for i in active))
    outs = (*spec.outs, *(spec.outs[i] for i in moving))
    results = bind(Spec(jaxpr, spec.chunks, ins, outs, spec.remat), [*primals, *dots])
    return results[: len(spec.outs)], results[len(spec.outs) :]


def _linearize(
    spec: Spec, primals: Sequence[Any], dots: Sequence[Any], active: list[int], moving: list[int]
) -> tuple[list[Any], list[Any]]:
    """Values with what the linear map of the tangents needs of each chunk, and that linear map."""
    fn, n_outs = jaxpr_as_fun(spec.jaxpr), len(spec.outs)
    treedef: Any = None
    impls: list[Any] = []

    def known(*args: Any) -> list[Any]:
        nonlocal treedef, impls
        outs, linear = jax.linearize(_restricted(fn, list(args), active), *(args[i] for i in active))
        residuals, treedef = jax.tree.flatten(linear)
        # A loop cannot carry typed keys, as there are no zeros of them.
        impls = [jax.random.key_impl(r) if jnp.issubdtype(r.dtype, jax.dtypes.prng_key) else None for r in residuals]
        data = [r if impl is None else jax.random.key_data(r) for r, impl in zip(residuals, impls, strict=True)]
        return [*outs, *data]

    traced = trace(known, spec.jaxpr.in_avals)

    def linear(*args: Any) -> list[Any]:
        pairs = zip(args[: len(impls)], impls, strict=True)
        residuals = [r if impl is None else jax.random.wrap_key_data(r, impl=impl) for r, impl in pairs]
        outs = treedef.unflatten(residuals)(*args[len(impls) :])
        return [outs[i] for i in moving]

    linear_jaxpr = trace(linear, [*traced.out_avals[n_outs:], *_tangent_types(spec.jaxpr, active)])

    # A residual is stacked chunk by chunk, unless it is an operand already or the same for all chunks.
    body = traced.jaxpr
    position = {var: i for i, var in enumerate(body.invars)}
    per_chunk = depends(traced, [kind.kind is not Kind.WHOLE for kind in spec.ins])
    stacked: list[int] = []
    shared: list[int] = []
    sources: list[tuple[str, int]] = []
    for at, var in enumerate(body.outvars[n_outs:], n_outs):
        at_input = None if hasattr(var, "val") else position.get(var)
        if at_input is not None:
            sources.append(("operand", at_input))
        elif per_chunk[at] or side_effects(traced):
            sources.append(("stacked", len(stacked)))
            stacked.append(at)
        else:
            sources.append(("shared", len(shared)))
            shared.append(at)

    outs_at = [*range(n_outs), *stacked]
    known_jaxpr = trace(lambda *args: evaluate(traced, args, outs_at), spec.jaxpr.in_avals)
    known_outs = (*spec.outs, *[Out(Kind.CHUNK)] * len(stacked))
    results = bind(Spec(known_jaxpr, spec.chunks, spec.ins, known_outs, spec.remat), primals)
    wholes = [p if kind.kind is Kind.WHOLE else None for p, kind in zip(primals, spec.ins, strict=True)]
    values = {
        "operand": list(primals),
        "stacked": results[n_outs:],
        "shared": evaluate(traced, wholes, shared) if shared else [],
    }
    kinds = {"operand": spec.ins, "stacked": [In(Kind.CHUNK)] * len(stacked), "shared": [In(Kind.WHOLE)] * len(shared)}
    linear_ins = (*(kinds[source][i] for source, i in sources), *(spec.ins[i] for i in active))
    linear_spec = Spec(linear_jaxpr, spec.chunks, linear_ins, tuple(spec.outs[i] for i in moving), spec.remat)
    return results[:n_outs], bind(linear_spec, [*(values[source][i] for source, i in sources), *dots])


def _transpose(cotangents: Sequence[Any], *operands: Any, spec: Spec) -> list[Any]:
    linear = [i for i, operand in enumerate(operands) if ad.is_undefined_primal(operand)]
    given = [i for i, ct in enumerate(cotangents) if type(ct) is not ad.Zero]
    results: list[Any] = [ad.Zero(x.aval.to_ct_aval()) if ad.is_undefined_primal(x) else None for x in operands]
    if not given:
        return results
    known = [i for i in range(len(operands)) if i not in linear]
    jaxpr, chunks = spec.grad_jaxpr or spec.jaxpr, spec.grad_chunks or spec.chunks
    fn = jaxpr_as_fun(jaxpr)

    def transposed(*args: Any) -> list[Any]:
        constant: list[Any] = [None] * len(operands)
        for i, value in zip(known, args[: len(known)], strict=True):
            constant[i] = value

        def forward(*values: Any) -> list[Any]:
            outs = _restricted(fn, constant, linear)(*values)
            return [outs[i] for i in given]

        return list(jax.linear_transpose(forward, *(jaxpr.in_avals[i] for i in linear))(list(args[len(known) :])))

    back_to = {Kind.ROWS: Kind.ROWS, Kind.CHUNK: Kind.CHUNK, Kind.SUM: Kind.WHOLE, Kind.WHOLE: Kind.SUM}
    cotangents_in = (In(back_to[spec.outs[i].kind], spec.outs[i].axis, masked=True) for i in given)
    back = Spec(
        trace(transposed, [*(jaxpr.in_avals[i] for i in known), *(jaxpr.out_avals[i].to_ct_aval() for i in given)]),
        chunks,
        (*(spec.ins[i] for i in known), *cotangents_in),
        tuple(Out(back_to[spec.ins[i].kind], spec.ins[i].axis) for i in linear),
        spec.remat,
    )
    for i, ct in zip(linear, bind(back, [*(operands[i] for i in known), *(cotangents[i] for i in given)]), strict=True):
        results[i] = ct
    return results


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], *, spec: Spec) -> tuple[list[Any], list[Any]]:
    placed, ins, in_axes = [], [], []
    for x, kind, dim in zip(operands, spec.ins, dims, strict=True):
        if dim is None:  # not batched
            placed.append(x)
            ins.append(kind)
            in_axes.append(None)
        elif kind.kind is Kind.WHOLE:
            placed.append(x)
            ins.append(kind)
            in_axes.append(dim)
        elif kind.kind is Kind.CHUNK:
            placed.append(jnp.moveaxis(x, dim, 1))
            ins.append(kind)
            in_axes.append(0)
        else:
            # The rows' axis is moved to the front of a chunk, so that nothing is transposed as a whole.
            axis = kind.axis + (dim <= kind.axis)
            placed.append(x)
            ins.append(dataclasses.replace(kind, axis=axis))
            in_axes.append(dim + (dim < axis))
    batched = depends(spec.jaxpr, [axis is not None for axis in in_axes])
    if axis_data.name in named_axes(spec.jaxpr):  # such as axis_index, which depends on no operand
        batched = [True] * len(batched)
    # In a chunk the rows stay first; in the whole result the batch is, where jax.vmap most often wants it.
    out_axes = [int(out.kind is Kind.ROWS) if flag else None for out, flag in zip(spec.outs, batched, strict=True)]
    outs = tuple(
        dataclasses.replace(out, axis=out.axis + 1) if flag and out.kind is Kind.ROWS else out
        for out, flag in zip(spec.outs, batched, strict=True)
    )

    def batch(jaxpr: ClosedJaxpr, chunks: Chunks) -> ClosedJaxpr:
        fn = jax.vmap(
            lambda *args: list(jaxpr_as_fun(jaxpr)(*args)),
            in_axes=tuple(in_axes),
            out_axes=out_axes,
            axis_size=axis_data.size,
            axis_name=axis_data.name,
            spmd_axis_name=axis_data.spmd_name,
        )
        return trace(fn, chunk_types(placed, ins, chunks))

    new = dataclasses.replace(
        spec,
        jaxpr=batch(spec.jaxpr, spec.chunks),
        ins=tuple(ins),
        outs=outs,
        grad_jaxpr=batch(spec.grad_jaxpr, spec.grad_chunks) if spec.grad_jaxpr and spec.grad_chunks else None,
    )
    out_dims = [int(out.kind is Kind.CHUNK) if flag else None for out, flag in zip(outs, batched, strict=True)]
    return bind(new, placed), out_dims


def _with_spec(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that takes the parameters of the primitive one by one, where JAX looks for jaxprs in them."""

    @functools.wraps(rule)
    def of_params(*args: Any, **params: Any) -> Any:
        return rule(*args, spec=Spec(**params))

    return of_params


map_p.def_impl(_with_spec(_impl))
# Where primitives inside a chunk are made of simpler ones (jnp.interp is), JAX asks for a loop of those once all
# derivatives are taken: that of `run_loop`.
map_p.to_lojax = _with_spec(_impl)
map_p.def_effectful_abstract_eval(_with_spec(_abstract_eval))
ad.primitive_jvps[map_p] = _with_spec(_jvp)
ad.primitive_transposes[map_p] = _with_spec(_transpose)
batching.fancy_primitive_batchers[map_p] = _with_spec(_batch)
mlir.register_lowering(map_p, mlir.lower_fun(_with_spec(run_loop), multiple_results=True))
