"""Eight CPU devices for the tests of meshes."""

import jax

# Must come before JAX starts its devices; repeating it with the same number is harmless.
jax.config.update("jax_num_cpu_devices", 8)
