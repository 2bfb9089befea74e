"""The state of JAX that a trace depends on besides its arguments."""

import contextlib
from collections.abc import Generator

import jax
from jax.extend.core import unsafe_get_axis_names_DO_NOT_USE as get_axis_names

# What users set among the options that are part of JAX's trace cache key. A name that one jax version lacks is skipped.
_OPTIONS = (
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_default_device",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_softmax_custom_jvp",
    "jax_debug_key_reuse",
    "jax_use_direct_linearize",
)


def in_trace() -> bool:
    """Whether JAX is tracing: inside `jit`, `grad`, `vmap` and the like."""
    try:
        jax.sharding.get_mesh()  # documented to be refused inside a trace; JAX has no other public way to ask
    except ValueError:
        return True
    return False


def describe_mesh(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
    """A mesh in words: `"none"`, or `"data=4 (Auto), model=2 (Explicit)"`."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return ", ".join(f"{name}={size} ({kind.name})" for name, size, kind in axes) or "none"


def ambient_mesh() -> str:
    """The mesh in context, in words."""
    return describe_mesh(jax.sharding.get_abstract_mesh())


def named_axes() -> str:
    """The named axes in scope, in words: those of `jax.vmap(axis_name=)` and `jax.shard_map`."""
    return ", ".join(f"{name}={jax.lax.axis_size(name)}" for name in get_axis_names()) or "none"


def configuration() -> dict[str, str]:
    """The JAX options that a trace depends on, by name."""
    return {name: str(getattr(jax.config, name)) for name in _OPTIONS if hasattr(jax.config, name)}


@contextlib.contextmanager
def entered(mesh: jax.sharding.Mesh, function: str) -> Generator[None, None, None]:
    """Enter `mesh`; inside a trace, where JAX forbids that, require that it is the ambient mesh already.

    Raises:
        ValueError: Inside a trace whose ambient mesh is another one.
    """
    if not in_trace():
        with jax.set_mesh(mesh):
            yield
    elif jax.sharding.get_abstract_mesh() == mesh.abstract_mesh:
        yield
    else:
        raise ValueError(
            f"{function} is bound to mesh {describe_mesh(mesh)}, but was called inside a transformation (jit, grad, "
            f"vmap, ...) with ambient mesh {ambient_mesh()}, where a mesh cannot be entered. Wrap the outermost "
            "transformation's call in `with jax.set_mesh(mesh):`, with this same mesh."
        )
