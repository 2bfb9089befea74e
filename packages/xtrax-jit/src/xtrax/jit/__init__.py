"""`jax.jit` with an exact budget of traces, and an error that says what changed.

Every new shape, dtype, static value or call form makes `jax.jit` trace and compile again, in silence. The wrappers
here count the traces of one function, refuse the first one too many, and name the argument that caused it.
"""

from xtrax.jit._errors import TraceBudgetExceededError
from xtrax.jit._filter import filter_bounded_jit
from xtrax.jit._signature import TraceSignature
from xtrax.jit._types import BoundedFunction
from xtrax.jit._version import __version__
from xtrax.jit._wrap import batched_jit, bounded_jit, explain_retrace

__all__ = [
    "BoundedFunction",
    "TraceBudgetExceededError",
    "TraceSignature",
    "__version__",
    "batched_jit",
    "bounded_jit",
    "explain_retrace",
    "filter_bounded_jit",
]
