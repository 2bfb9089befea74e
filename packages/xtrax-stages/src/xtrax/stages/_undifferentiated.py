"""Values that must have no part in a derivative, checked where JAX takes it.

An effect on which nothing depends is lost in two ways, both in silence: its values are differentiated, or it lies in a
loop that is, which JAX takes apart: what differs from step to step, and reaches no output, is left out. The second is
seen by none of the values, and by no rule for their derivatives; but when a loop is taken apart JAX asks each primitive
how it wants to be. So this is a primitive, the identity, which refuses both.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from xtrax.stages._errors import ExecutorError

_undifferentiated_p = Primitive("undifferentiated")
_undifferentiated_p.multiple_results = True


def undifferentiated(tree: Any, refusal: str) -> Any:
    """The same tree of arrays; a derivative of it, or of a loop in which it changes, raises an `ExecutorError`.

    Args:
        tree: What an effect on which nothing depends is computed from.
        refusal: The text of the error.
    """
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten(_undifferentiated_p.bind(*map(jnp.asarray, leaves), refusal=refusal) if leaves else [])


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, refusal: str) -> tuple[list[Any], list[Any]]:
    if any(type(tangent) is not ad.Zero for tangent in tangents):
        raise ExecutorError(refusal)
    return _undifferentiated_p.bind(*primals, refusal=refusal), list(tangents)


def _taken_apart(trace: Any, *tracers: Any, refusal: str) -> Any:
    """What becomes of it when some values are computed before others."""
    del trace
    if not all(tracer.is_known() for tracer in tracers):
        raise ExecutorError(refusal)
    return _undifferentiated_p.bind(*(tracer.pval.get_known() for tracer in tracers), refusal=refusal)


def _batch(values: Sequence[Any], dims: Sequence[Any], *, refusal: str) -> tuple[list[Any], Sequence[Any]]:
    return _undifferentiated_p.bind(*values, refusal=refusal), dims


def _same(*values: Any, refusal: str) -> list[Any]:
    del refusal
    return list(values)


def _lowering(context: Any, *values: Any, refusal: str) -> list[Any]:
    del context, refusal
    return list(values)


_undifferentiated_p.def_impl(_same)
_undifferentiated_p.def_abstract_eval(_same)
ad.primitive_jvps[_undifferentiated_p] = _jvp
pe.custom_partial_eval_rules[_undifferentiated_p] = _taken_apart
batching.primitive_batchers[_undifferentiated_p] = _batch
mlir.register_lowering(_undifferentiated_p, _lowering)
