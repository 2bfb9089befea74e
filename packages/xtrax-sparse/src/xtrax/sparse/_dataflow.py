"""Follow the axes of a model's arrays through its computation.

`flow` walks a jaxpr, the traced form of a function, and gives every axis of every value its factors
(`xtrax.sparse._factors`). What it does not understand fixes all sizes that meet it, so that the answer errs on the
safe side.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Literal

from xtrax.sparse._factors import Axis, Factor, fix, regroup, same

CONSTANT, WEIGHT, DATA = 0, 1, 2
"""What a value depends on: nothing, parameters only, or the inputs."""


@dataclass
class Value:
    """The axes of a traced value and what it depends on."""

    axes: list[Axis]
    origin: int


def fresh(shape: Sequence[int], origin: int, reason: str | None = None) -> Value:
    """A value whose axes are not yet the same as any other's."""
    return Value([[Factor(size, reason)] for size in shape], origin)


def fix_all(values: Sequence[Value], reason: str) -> None:
    """Fix every size of these values."""
    for value in values:
        for axis in value.axes:
            fix(axis, reason)


Trail = list[tuple[tuple[int, ...], list[Axis]]]
"""Shape and axes of every value on the way, in the order of computation."""


def flow(jaxpr: Any, inputs: Sequence[Value], trail: Trail) -> list[Value]:
    """The outputs of a jaxpr, open or closed, for these inputs; what is computed on the way is added to `trail`."""
    values: dict[Any, Value] = {}
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)

    def read(atom: Any) -> Value:
        if isinstance(atom, Literal):
            return fresh(atom.aval.shape, CONSTANT, "it meets a constant array of the code")
        return values[atom]

    for var in jaxpr.constvars:
        values[var] = fresh(var.aval.shape, CONSTANT, "it meets a constant array of the code")
    values.update(zip(jaxpr.invars, inputs, strict=True))
    for eqn in jaxpr.eqns:
        arguments = [read(atom) for atom in eqn.invars]
        shapes = [var.aval.shape for var in eqn.outvars]
        name = eqn.primitive.name
        if name in _RULES:
            outputs = _RULES[name](eqn, arguments, shapes)
        elif name in _ELEMENTWISE:
            outputs = _elementwise(eqn, arguments, shapes)
        else:
            outputs = _NESTED.get(name, _unknown_with_parts)(eqn, arguments, shapes, trail)
        trail += [(shape, value.axes) for shape, value in zip(shapes, outputs, strict=True)]
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


_Rule = Callable[[Any, list[Value], list[tuple[int, ...]]], list[Value]]
_NestedRule = Callable[[Any, list[Value], list[tuple[int, ...]], Trail], list[Value]]

# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "conj", "convert_element_type", "copy", "copy_p", "cos", "cosh",
    "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag",
    "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg",
    "nextafter", "not", "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin",
    "sinh", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on


def _origin(arguments: Sequence[Value]) -> int:
    return max((value.origin for value in arguments), default=CONSTANT)


def _unknown(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    reason = f"it passes through {eqn.primitive.name}, which pruning does not follow"
    fix_all(arguments, reason)
    return [fresh(shape, DATA, reason) for shape in shapes]


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs among the parameters of an operation."""
    return [
        inner
        for value in eqn.params.values()
        for inner in (value if isinstance(value, tuple | list) else (value,))
        if hasattr(getattr(inner, "jaxpr", inner), "eqns")
    ]


def _unknown_with_parts(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]], trail: Trail) -> list[Value]:
    # Constants made inside, such as the sum of an iota, may depend on a size that nothing else in there has.
    outputs = _unknown(eqn, arguments, shapes)
    for inner in inner_jaxprs(eqn):
        invars = getattr(inner, "jaxpr", inner).invars
        flow(inner, [fresh(getattr(var.aval, "shape", ()), DATA, "it is inside") for var in invars], trail)
    return outputs


def _elementwise(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    # Axes of length one are broadcast, and scalars to every axis.
    del eqn
    axes: list[Axis] = []
    for at, length in enumerate(shapes[0]):
        full = [value.axes[at] for value in arguments if value.axes and _length(value.axes[at]) == length]
        for other in full[1:]:
            same(full[0], other)
        axes.append(full[0])
    return [Value(axes, _origin(arguments)) for _ in shapes]


def _length(axis: Axis) -> int:
    return math.prod(factor.size for factor in axis)


def _broadcast(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    operand, shape = arguments[0], shapes[0]
    out = fresh(shape, operand.origin)
    for axis, where in zip(operand.axes, eqn.params["broadcast_dimensions"], strict=True):
        if _length(axis) == shape[where]:
            out.axes[where] = axis
    return [out]


def _reshape(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    if eqn.params.get("dimensions") is not None or 0 in shapes[0]:
        return _unknown(eqn, arguments, shapes)
    return [Value(regroup(arguments[0].axes, shapes[0]), arguments[0].origin)]


def _squeeze(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    del shapes
    gone = {int(axis) for axis in eqn.params["dimensions"]}
    axes = [axis for where, axis in enumerate(arguments[0].axes) if where not in gone]
    return [Value(axes, arguments[0].origin)]


def _transpose(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    del shapes
    return [Value([arguments[0].axes[where] for where in eqn.params["permutation"]], arguments[0].origin)]


def _reduce(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    gone = {int(axis) for axis in eqn.params["axes"]}
    name = eqn.primitive.name
    for value in arguments:
        for axis in gone:
            fix(value.axes[axis], f"it is reduced by {name}: a mean, a norm or a softmax depends on its size")
    axes = [axis for where, axis in enumerate(arguments[0].axes) if where not in gone]
    return [Value(axes, _origin(arguments)) for _ in shapes]


def _contract(one: Axis, two: Axis, left: Value, right: Value) -> None:
    same(one, two)
    if WEIGHT not in (left.origin, right.origin) or left.origin == right.origin:
        fix(one, "it is summed over between two values neither of which is a weight, as in the scores of attention")


def _dot_general(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    del shapes
    left, right = arguments
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    for one, two in zip(left_batch, right_batch, strict=True):
        same(left.axes[one], right.axes[two])
    for one, two in zip(left_sum, right_sum, strict=True):
        _contract(left.axes[one], right.axes[two], left, right)
    free_left = [axis for at, axis in enumerate(left.axes) if at not in {*left_sum, *left_batch}]
    free_right = [axis for at, axis in enumerate(right.axes) if at not in {*right_sum, *right_batch}]
    return [Value([left.axes[at] for at in left_batch] + free_left + free_right, _origin(arguments))]


def _conv(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    left, right = arguments
    if eqn.params["feature_group_count"] != 1 or eqn.params["batch_group_count"] != 1:
        reason = "it passes through a grouped convolution"
        fix_all(arguments, reason)
        return [fresh(shapes[0], DATA, reason)]
    numbers = eqn.params["dimension_numbers"]
    (batch, feature, *window), (made, taken, *kernel) = numbers.lhs_spec, numbers.rhs_spec
    _contract(left.axes[feature], right.axes[taken], left, right)
    for value, places in ((left, window), (right, kernel)):
        for place in places:
            fix(value.axes[place], "it is an axis that a window slides over")
    out = fresh(shapes[0], _origin(arguments))
    out.axes[numbers.out_spec[0]] = left.axes[batch]
    out.axes[numbers.out_spec[1]] = right.axes[made]
    for place in numbers.out_spec[2:]:
        fix(out.axes[place], "it is an axis that a window slides over")
    return [out]


def _keep_where(eqn: Any, value: Value, shape: tuple[int, ...], whole: Sequence[bool]) -> Value:
    """A value of which some axes pass whole; the others are fixed, and new ones take their place."""
    reason = f"{eqn.primitive.name} takes or adds a part of it"
    out = fresh(shape, value.origin)
    for where, (axis, passes) in enumerate(zip(value.axes, whole, strict=True)):
        if passes:
            out.axes[where] = axis
        else:
            fix(axis, reason)
            fix(out.axes[where], reason)
    return out


def _reduce_window(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    p = eqn.params
    whole = [
        window == stride == 1 and tuple(padding) == (0, 0)
        for window, stride, padding in zip(p["window_dimensions"], p["window_strides"], p["padding"], strict=True)
    ]
    return [_keep_where(eqn, arguments[0], shape, whole) for shape in shapes]


def _slice(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    shape = tuple(eqn.invars[0].aval.shape)
    return [_keep_where(eqn, arguments[0], shapes[0], [a == b for a, b in zip(shape, shapes[0], strict=True)])]


def _pad(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    whole = [tuple(config) == (0, 0, 0) for config in eqn.params["padding_config"]]
    return [_keep_where(eqn, arguments[0], shapes[0], whole)]


def _along(parameter: str) -> _Rule:
    """The rule of an operation that mixes the elements of one axis and treats the others alike."""

    def rule(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        where = eqn.params[parameter]
        mixed = {int(w) for w in where} if isinstance(where, tuple) else {int(where)}
        for other in arguments[1:]:
            for at, (one, two) in enumerate(zip(arguments[0].axes, other.axes, strict=True)):
                if at not in mixed:
                    same(one, two)
        origin = _origin(arguments)
        outputs = []
        for shape in shapes:
            out = None
            for value in arguments:
                kept = _keep_where(eqn, value, shape, [at not in mixed for at in range(len(shape))])
                out = out or Value(kept.axes, origin)
            outputs.append(out or fresh(shape, origin))
        return outputs

    return rule


def _iota(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    # The values count the units: those of the units that stay would be counted anew.
    del arguments
    out = fresh(shapes[0], CONSTANT)
    fix(out.axes[eqn.params["dimension"]], "it meets an iota, whose values depend on the position of a unit")
    return [out]


def _call(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]], trail: Trail) -> list[Value]:
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    if inner is None or len(getattr(inner, "jaxpr", inner).invars) != len(arguments):
        return _unknown_with_parts(eqn, arguments, shapes, trail)
    return flow(inner, arguments, trail)


def _cond(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]], trail: Trail) -> list[Value]:
    del shapes
    branches = [flow(branch, arguments[1:], trail) for branch in eqn.params["branches"]]
    for other in branches[1:]:
        for one, two in zip(branches[0], other, strict=True):
            for a, b in zip(one.axes, two.axes, strict=True):
                same(a, b)
    return [Value(value.axes, DATA) for value in branches[0]]


def _scan(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]], trail: Trail) -> list[Value]:
    body = eqn.params["jaxpr"]
    inner = getattr(body, "jaxpr", body)
    # Scanned arrays and stacked outputs have one axis more outside than inside; the parameters that count them differ
    # between versions of JAX.
    scanned = [len(out.aval.shape) > len(in_.aval.shape) for out, in_ in zip(eqn.invars, inner.invars, strict=True)]
    stacked = [len(shape) > len(var.aval.shape) for shape, var in zip(shapes, inner.outvars, strict=True)]
    carries = stacked.count(False)
    first = scanned.count(False) - carries
    inputs = []
    for position, (value, is_scanned) in enumerate(zip(arguments, scanned, strict=True)):
        if is_scanned:
            fix(value.axes[0], "it is the axis of a scan")
            inputs.append(Value(value.axes[1:], value.origin))
        else:
            inputs.append(Value(value.axes, DATA if position >= first else value.origin))
    outputs = flow(body, inputs, trail)
    for carry, out in zip(inputs[first : first + carries], outputs, strict=False):
        for one, two in zip(carry.axes, out.axes, strict=True):
            same(one, two)
    return [
        Value([[Factor(shape[0], "it is the axis of a scan")], *out.axes], DATA)
        if is_stacked
        else Value(out.axes, DATA)
        for out, shape, is_stacked in zip(outputs, shapes, stacked, strict=True)
    ]


def _each(eqn: Any, arguments: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    del eqn, shapes
    return arguments


_RULES: dict[str, _Rule] = {
    "broadcast_in_dim": _broadcast,
    "concatenate": _along("dimension"),
    "conv_general_dilated": _conv,
    "dot_general": _dot_general,
    "dynamic_slice": _slice,
    "iota": _iota,
    "optimization_barrier": _each,
    "pad": _pad,
    "reshape": _reshape,
    "rev": _along("dimensions"),
    "slice": _slice,
    "sort": _along("dimension"),
    "split": _along("axis"),
    "squeeze": _squeeze,
    "transpose": _transpose,
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _reduce,
    ),
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _reduce_window),
}

_NESTED: dict[str, _NestedRule] = {
    "cond": _cond,
    "scan": _scan,
    **dict.fromkeys(
        ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint"),
        _call,
    ),
}
