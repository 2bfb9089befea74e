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


@pytest.fixture
def as_nobody(tmp_path):
    """Root may write anywhere, so a test of permissions has to be someone else: `with as_nobody(): ...`.

    That one may look into the folder of the test, whose parents pytest keeps to itself.
    """
    for folder in (tmp_path, *tmp_path.parents):
        mode = folder.stat().st_mode
        if mode & 0o005 != 0o005:
            os.chmod(folder, mode | 0o055)
    return _as_nobody
