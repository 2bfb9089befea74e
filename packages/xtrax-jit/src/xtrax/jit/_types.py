"""The type of what the wrappers return."""

from typing import Any, ParamSpec, Protocol, TypeVar, overload

import jax

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class BoundedFunction(Protocol[P, R_co]):
    """A compiled function with a budget of traces: what every wrapper of `xtrax.jit` returns.

    It is called like the function it wraps, and has the methods of a `jax.jit` function. A method that has to trace
    counts as a call that has to trace does; a signature that any of them has traced is free for the others.
    """

    __name__: str

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function, compiling it first for arguments of a new kind."""
        ...

    @overload
    def __get__(self, instance: None, owner: Any, /) -> "BoundedFunction[P, R_co]": ...
    @overload
    def __get__(self, instance: object, owner: Any, /) -> "BoundedFunction[..., R_co]": ...

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower for these arguments (arrays or `jax.ShapeDtypeStruct`); `.compile()` of the result compiles ahead."""
        ...

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Trace for these arguments; the result has the `.jaxpr`."""
        ...

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The result's tree, with a `jax.ShapeDtypeStruct` in place of each array; nothing is compiled."""
        ...

    def clear_cache(self) -> None:
        """Drop the traces and compiled programs. The count stays: what is traced again is counted again."""
        ...
