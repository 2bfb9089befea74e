"""What was made for a function: kept while the function lives, and while what it uses is not replaced.

Functions are called again in notebooks after what they use was changed. So what was made for one is made anew when a
variable that it closes over, or a global one that it names, is another object than before. What changes inside these
objects is not seen, as with `jax.jit`.
"""

import dataclasses
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterable, MutableMapping, Sequence
from types import CodeType, FunctionType, MethodType
from typing import Any, Generic, TypeVar

import jax
import numpy as np

# What a trace depends on besides the types of its arguments.
_OPTIONS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
)

# What comes after so many entries of a container is data, and no functions.
_MOST_PARTS = 256
_HOLD_NOTHING = (jax.Array, np.ndarray, bool, int, float, complex, str, bytes, type(None), type)

Made = TypeVar("Made")


class Kept(Generic[Made]):
    """What was made for functions.

    A function is referred to weakly, or the object that it is a method of, so that what was made for it goes when it
    goes. A tree, such as a module, is made anew with each change of its arrays, and is known by the key alone, which
    has its structure; of these the last few are kept. What cannot be hashed, or referred to weakly, is not kept.
    """

    def __init__(self, most: int) -> None:
        """Nothing yet; of trees, the last `most` will be kept."""
        self._most = most
        self._by_function: MutableMapping[Any, dict[Hashable, tuple[Hashable, Made]]] = weakref.WeakKeyDictionary()
        self._by_structure: OrderedDict[Hashable, tuple[Hashable, Made]] = OrderedDict()

    def get(self, fn: Any, key: Hashable, others: Sequence[Any] = ()) -> Made | None:
        """What `put` was given for the same arguments, options of JAX and mesh; None if nothing, or not any more."""
        store, entry = self._place(fn, key)
        captured, made = store.get(entry, (None, None))
        if made is None or captured != _captured((fn, *others)):
            return None
        if store is self._by_structure:
            self._by_structure.move_to_end(entry)
        return made

    def put(self, fn: Any, key: Hashable, made: Made, others: Sequence[Any] = ()) -> None:
        """Keep something.

        Args:
            fn: the function, or a tree that holds it.
            key: what it depends on besides `fn`.
            made: what to keep, which must not refer to `fn`.
            others: what else it calls.
        """
        store, entry = self._place(fn, key)
        store[entry] = (_captured((fn, *others)), made)
        if len(self._by_structure) > self._most:
            self._by_structure.popitem(last=False)

    def _place(self, fn: Any, key: Hashable) -> tuple[MutableMapping[Hashable, tuple[Hashable, Made]], Hashable]:
        options = tuple(str(getattr(jax.config, name, None)) for name in _OPTIONS)
        # A bound method is made anew at each look-up, but its object is not.
        method = isinstance(fn, MethodType)
        entry = (fn.__func__ if method else None, key, options, jax.sharding.get_abstract_mesh())
        try:
            hash(entry)
            if jax.tree.structure(fn) != jax.tree.structure(0):
                return self._by_structure, entry
            return self._by_function.setdefault(fn.__self__ if method else fn, {}), entry
        except TypeError:
            return {}, None


def name_of(functions: Iterable[Any]) -> str:
    """The name of the first that is a function, for profiles."""
    for function in functions:
        while isinstance(function, functools.partial):
            function = function.func
        if function is not None:
            name = getattr(function, "__name__", None)
            if isinstance(name, str) and name != "__call__":
                return name
            return type(getattr(function, "__self__", function)).__name__
    return "execute_plan"


def _captured(roots: Sequence[Any]) -> Hashable:
    """The variables that functions use, also those in dataclasses and containers: numbers by value, else identity."""
    found: list[Hashable] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        # The type is asked, as each attribute of an eqx.Module costs a microsecond.
        kind = type(value)
        if id(value) in seen or issubclass(kind, _HOLD_NOTHING):
            return
        seen.add(id(value))
        if kind is FunctionType:
            visit_function(value)
            return
        parts: list[Any] = []
        if issubclass(kind, (list, tuple)):
            parts = list(value[:_MOST_PARTS])
        elif issubclass(kind, dict):
            parts = list(itertools.islice(value.values(), _MOST_PARTS))
        elif issubclass(kind, functools.partial):
            parts = [value.func]
        elif kind is MethodType:
            parts = [value.__func__, value.__self__]
        elif dataclasses.is_dataclass(kind) or callable(value):
            held = getattr(value, "__dict__", {})
            # What wraps a function, such as a jax.custom_jvp, calls it by code of a library.
            call = getattr(kind, "__call__", None)  # noqa: B004 - the function that it is, if it is one
            parts = [held["__wrapped__"]] if "__wrapped__" in held else [call, *held.values()]
        for part in parts:
            visit(part)

    def visit_function(function: FunctionType) -> None:
        seen.add(id(function))
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        variables = {name: cell.cell_contents for name, cell in cells if not _is_empty(cell)}
        variables |= {
            name: function.__globals__[name] for name in _names(function.__code__) & function.__globals__.keys()
        }
        for name in sorted(variables):
            value = variables[name]
            found.append((name, _identity(value)))
            # Functions of the same module are likely to be edited along with it; those of libraries are not.
            if isinstance(value, FunctionType) and value.__globals__ is function.__globals__ and id(value) not in seen:
                visit_function(value)

    for root in roots:
        visit(root)
    return tuple(found)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> frozenset[str]:
    """The names that code and the functions defined in it look up."""
    inner = (_names(const) for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(code.co_names).union(*inner)


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
