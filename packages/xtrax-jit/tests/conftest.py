"""Eight CPU devices for the tests of meshes."""

import jax
import pytest

# Must come before JAX starts its devices; repeating it with the same number is harmless.
jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture
def auto_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture
def explicit_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
