"""Compiled programs of eager calls, with no array compiled in, and found again on the next call.

A call outside any trace is compiled as a whole, since a loop of JAX outside `jax.jit` compiles anew each time. The
program is traced to a jaxpr, whose constants (arrays that the function closes over) become arguments. It has the name
of the function in profiles.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from xtrax.tiling._kept import Kept, name_of

_Program: TypeAlias = Callable[[list[Any]], Any]

_PROGRAMS: Kept[_Program] = Kept(128)


def run_program(
    fn: Any, key: Hashable | None, run: Callable[[list[Any]], Any], arrays: list[Any], others: Sequence[Any] = ()
) -> Any:
    """`run(arrays)`, compiled if this is not inside a trace.

    Args:
        fn: the function that `run` calls; the program is kept as long as it lives.
        key: what `run` depends on besides `fn` and the types of `arrays`; None to keep nothing.
        run: a function of the arrays.
        arrays: the operands.
        others: what else `run` calls, such as transitions: it is traced anew too if a variable of it is replaced.
    """
    if any(isinstance(array, Tracer) for array in arrays) or jax.config.jax_disable_jit:
        return run(arrays)
    signature = (key, tuple(jax.typeof(array) for array in arrays))
    program = None if key is None else _PROGRAMS.get(fn, signature, others)
    if program is None:
        traced, shape = jax.make_jaxpr(run, return_shape=True)(arrays)
        treedef = jax.tree.structure(shape)
        if any(isinstance(const, Tracer) for const in traced.consts):
            # A function inside someone's trace, with arguments outside it: the program is part of that trace.
            return jax.tree.unflatten(treedef, jaxpr_as_fun(traced)(*jax.tree.leaves(arrays)))
        program = _compiled(traced, treedef, name_of((fn, *others)))
        if key is not None:
            _PROGRAMS.put(fn, signature, program, others)
    return program(arrays)


def _compiled(traced: ClosedJaxpr, treedef: Any, name: str) -> _Program:
    def call(consts: list[Any], arrays: list[Any]) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*arrays)

    call.__name__ = call.__qualname__ = name
    consts, jitted = list(traced.consts), jax.jit(call)
    return lambda arrays: jax.tree.unflatten(treedef, jitted(consts, arrays))
