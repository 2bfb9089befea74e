"""Names, docstrings and signatures of what the wrappers return, and what importing the package costs."""

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xtrax.jit
from xtrax.jit import TraceBudgetExceededError, batched_jit, bounded_jit, filter_bounded_jit


def affine(x: jax.Array, w: float = 2.0, *, b: float = 0.0) -> jax.Array:
    """w x + b."""
    return w * x + b


class Affine:
    """Affine maps."""

    def __call__(self, x, w=2.0):
        return w * x

    def method(self, x):
        """A method."""
        return x


CASES: tuple[tuple[Callable[..., Any], str, str, str], ...] = (
    (affine, "affine", "w x + b.", str(inspect.signature(affine))),
    (functools.partial(affine, w=3.0), "affine", "w x + b.", str(inspect.signature(functools.partial(affine, w=3.0)))),
    (Affine(), "Affine", "Affine maps.", "(x, w=2.0)"),
    (Affine().method, "method", "A method.", "(x)"),
)


@pytest.mark.parametrize("with_mesh", [False, True])
@pytest.mark.parametrize("wrap", [bounded_jit, batched_jit, filter_bounded_jit])
@pytest.mark.parametrize(("function", "name", "doc", "signature"), CASES)
def test_name_docstring_and_signature_are_those_of_the_function(
    wrap, with_mesh, function, name, doc, signature, auto_mesh
):
    wrapped = wrap(function, max_traces=1, mesh=auto_mesh if with_mesh else None)
    assert wrapped.__name__ == name
    assert wrapped.__doc__ == doc
    assert str(inspect.signature(wrapped)) == signature
    assert f"jit_{name}" in wrapped.lower(jnp.ones(8)).as_text()[:200]


def test_without_a_mesh_the_result_is_a_jit_function():
    assert type(bounded_jit(affine, max_traces=1)) is type(jax.jit(affine))
    assert type(batched_jit(affine, max_traces=1)) is type(jax.jit(affine))


def test_errors_of_the_function_name_its_own_arguments():
    bounded = bounded_jit(lambda x: bool(x), max_traces=1)
    with pytest.raises(jax.errors.TracerBoolConversionError, match="the argument x") as caught:
        bounded(jnp.float32(1))
    assert "test_jit_interface.py" in str(caught.value)


def test_the_public_names_are_those_listed():
    assert set(xtrax.jit.__all__) == {
        "BoundedFunction",
        "TraceBudgetExceededError",
        "TraceSignature",
        "__version__",
        "batched_jit",
        "bounded_jit",
        "explain_retrace",
        "filter_bounded_jit",
    }
    assert TraceBudgetExceededError.__module__ == "xtrax.jit"


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_does_not_import_equinox_or_start_devices():
    code = (
        "import sys, xtrax.jit, jax._src.xla_bridge as b\nprint('equinox' in sys.modules, b.backends_are_initialized())"
    )
    assert run_python(code).split() == ["False", "False"]


def test_without_equinox_the_error_says_what_to_install():
    code = """
import sys
sys.modules["equinox"] = None  # how Python marks a module that cannot be imported
from xtrax.jit import bounded_jit, filter_bounded_jit
try:
    filter_bounded_jit(abs, max_traces=1)
except ImportError as error:
    print(error)
print(bounded_jit(abs, max_traces=1)(-2.0))
"""
    message, result = run_python(code).splitlines()
    assert message.startswith("filter_bounded_jit needs Equinox, which is not installed")
    assert "xtrax-jit[equinox]" in message
    assert result == "2.0"
