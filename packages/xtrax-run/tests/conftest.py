"""Eight CPU devices for the tests of meshes, and another user for those of permissions."""

import contextlib
import os

import jax
import pytest

# Must come before JAX starts its devices; repeating it with the same number is harmless.
jax.config.update("jax_num_cpu_devices", 8)


@contextlib.contextmanager
def _as_nobody():
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.fixture(scope="session")
def as_nobody():
    """Root may write anywhere, so a test of permissions has to be someone else: `with as_nobody(): ...`."""
    return _as_nobody
