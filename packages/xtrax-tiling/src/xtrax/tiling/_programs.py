"""Programs that are compiled to be looked at or timed, the arrays that a function holds being arguments."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


@dataclasses.dataclass(frozen=True)
class Program:
    """A function traced for the shapes of its arguments.

    Arrays that it holds or closes over are arguments too: compiled in, they would be counted nowhere, and would slow
    the compiler down.

    Args:
        lowered: what `jax.jit(...).lower` made of it, `(consts, leaves) -> output leaves`.
        consts: the arrays that it holds.
    """

    lowered: Any
    consts: list[Any]

    @classmethod
    def of(cls, fn: Callable[..., Any], abstract_args: Sequence[Any]) -> "Program":
        """Trace a function; nothing is compiled.

        Args:
            fn: any callable.
            abstract_args: its arguments, pytrees of arrays or `jax.ShapeDtypeStruct`.
        """
        # The wrapper, since jax.make_jaxpr hashes what it is given, and modules that hold arrays cannot be.
        traced = jax.make_jaxpr(lambda *args: fn(*args))(*abstract_args)

        def call(consts: list[jax.Array], leaves: list[jax.Array]) -> list[jax.Array]:
            return jaxpr_as_fun(ClosedJaxpr(traced.jaxpr, consts))(*leaves)

        shapes = [jax.ShapeDtypeStruct(const.shape, const.dtype) for const in traced.consts]
        return cls(jax.jit(call).lower(shapes, jax.tree.leaves(abstract_args)), list(traced.consts))

    def digest(self) -> str:
        """Of the StableHLO text, which is the same in every process: it holds shapes and types, and no values."""
        return hashlib.sha256(self.lowered.as_text().encode()).hexdigest()

    def compile(self) -> Any:
        """The executable, `(consts, leaves) -> output leaves`; its constants are `consts`."""
        return self.lowered.compile()


def compiled_bytes(compiled: Any) -> int:
    """Arguments, outputs and temporaries of an executable, less what outputs take over from arguments.

    Raises:
        RuntimeError: the backend does not analyse memory.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError(f"the {jax.default_backend()} backend does not analyse the memory of compiled programs.")
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        + analysis.temp_size_in_bytes
        - analysis.alias_size_in_bytes
    )


def as_abstract(args: Sequence[Any], name: str = "abstract_args") -> list[Any]:
    """The arguments with every leaf as a `ShapeDtypeStruct`.

    Raises:
        TypeError: a leaf without shape and dtype.
    """
    abstract: list[Any] = []
    for i, arg in enumerate(args):
        leaves, treedef = jax.tree.flatten(arg)
        for leaf in leaves:
            if isinstance(leaf, type) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
                raise TypeError(
                    f"{name}[{i}] must hold arrays or jax.ShapeDtypeStruct, but has the leaf {leaf!r} "
                    f"({type(leaf).__name__}); close over what is no array."
                )
        abstract.append(treedef.unflatten([jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]))
    return abstract
