"""Compiled programs of eager calls, with no array compiled in, and found again on the next call.

A call outside any trace is compiled as a whole, since a loop of JAX outside `jax.jit` compiles anew each time. The
program is traced to a jaxpr, whose constants (arrays that the function closes over) become arguments. A plain function
is traced anew when a variable that it closes over, or a global one that it names, is another object than before, since
functions are called again in notebooks after what they use was changed. What changes inside these objects is not seen,
as with `jax.jit`.
"""

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from types import CodeType, FunctionType
from typing import Any, TypeAlias

import jax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_disable_jit",
)
_LIMIT = 128

_Program: TypeAlias = Callable[[list[Any]], Any]

# Programs live as long as their function; those of a function that is a tree of arrays are found by its structure.
_BY_FUNCTION: MutableMapping[Any, dict[Hashable, tuple[Hashable, _Program]]] = weakref.WeakKeyDictionary()
_BY_STRUCTURE: OrderedDict[Hashable, tuple[Hashable, _Program]] = OrderedDict()


def run_program(
    fn: Any, key: Hashable | None, run: Callable[[list[Any]], Any], arrays: list[Any], others: Sequence[Any] = ()
) -> Any:
    """`run(arrays)`, compiled if this is not inside a trace.

    Args:
        fn: the function that `run` calls; the program is kept as long as it lives.
        key: what `run` depends on besides `fn` and the types of `arrays`; None to keep nothing.
        run: a function of the arrays.
        arrays: the operands.
        others: what else `run` calls, such as transitions, which is traced anew too if a variable of it is replaced.
    """
    if any(isinstance(array, Tracer) for array in arrays) or jax.config.jax_disable_jit:
        return run(arrays)
    programs, owner = _programs_of(fn)
    signature = None if key is None or programs is None else _signature(owner, key, arrays)
    if signature is not None and programs is not None and signature in programs:
        captured, program = programs[signature]
        if captured == _captured((fn, *others)):
            return program(arrays)
    traced, shape = jax.make_jaxpr(run, return_shape=True)(arrays)
    treedef = jax.tree.structure(shape)
    if any(isinstance(const, Tracer) for const in traced.consts):
        # A function inside someone's trace, with arguments outside it: the program is part of that trace.
        return jax.tree.unflatten(treedef, jaxpr_as_fun(traced)(*jax.tree.leaves(arrays)))
    program = _compiled(traced, treedef)
    if signature is not None and programs is not None:
        programs[signature] = (_captured((fn, *others)), program)
        if programs is _BY_STRUCTURE and len(_BY_STRUCTURE) > _LIMIT:
            _BY_STRUCTURE.popitem(last=False)
    return program(arrays)


def _compiled(traced: ClosedJaxpr, treedef: Any) -> Callable[[list[Any]], Any]:
    @jax.jit
    def execute_plan(consts: list[Any], arrays: list[Any]) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*arrays)

    consts = list(traced.consts)
    return lambda arrays: jax.tree.unflatten(treedef, execute_plan(consts, arrays))


def _programs_of(fn: Any) -> tuple[Any, Hashable]:
    """Where the programs of `fn` are kept, and what tells it from others there; None if nowhere."""
    if isinstance(fn, functools.partial) or jax.tree.structure(fn) != jax.tree.structure(0):
        owner: Any = fn if isinstance(fn, functools.partial) else None
    else:
        owner = getattr(fn, "__self__", None) or fn  # a bound method is made anew at each look-up
    if owner is None:
        return _BY_STRUCTURE, None
    try:
        return _BY_FUNCTION.setdefault(owner, {}), getattr(fn, "__func__", None)
    except TypeError:  # it cannot be hashed or weakly referenced
        return None, None


def _signature(owner: Hashable, key: Hashable, arrays: list[Any]) -> Hashable | None:
    options = tuple(str(getattr(jax.config, name, None)) for name in _OPTIONS)
    types = tuple(jax.typeof(array) for array in arrays)
    try:
        signature = (owner, key, types, options, jax.sharding.get_abstract_mesh())
        hash(signature)
    except TypeError:
        return None
    return signature


def _captured(functions: Sequence[Any]) -> Hashable:
    """The variables that plain functions use: numbers by value, objects by identity."""
    found: dict[str, Hashable] = {}
    seen: set[int] = set()

    def visit(function: FunctionType) -> None:
        if id(function) in seen:
            return
        seen.add(id(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
        variables |= {name: function.__globals__[name] for name in _names(function) if name in function.__globals__}
        for name, value in variables.items():
            found[f"{len(seen)} {name}"] = _identity(value)
            # Functions of the same module are likely to be edited along with it; those of libraries are not.
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__:
                visit(value)

    for function in functions:
        function = getattr(function, "__func__", function)
        if isinstance(function, FunctionType):
            visit(function)
    return tuple(found.items())


def _names(function: FunctionType) -> set[str]:
    def of_code(code: CodeType) -> set[str]:
        inner = (of_code(const) for const in code.co_consts if isinstance(const, CodeType))
        return set(code.co_names).union(*inner)

    return of_code(function.__code__)


def _is_empty(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018 - reading it is the question
    except ValueError:
        return True
    return False


def _identity(value: Any) -> Hashable:
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        return (type(value), repr(value))
    try:
        # A dead reference equals none but itself, so that another object at the same address is told apart.
        return (id(value), _Alive(value))
    except TypeError:
        return (id(value), None)


class _Alive:
    """A weak reference that is compared by the identity of a living object."""

    def __init__(self, value: Any) -> None:
        self._ref = weakref.ref(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alive) and self._ref() is not None and self._ref() is other._ref()

    def __hash__(self) -> int:
        return id(self._ref)
