"""Eight CPU devices for the tests of meshes, and a count of what is compiled."""

import contextlib

import jax
import pytest

# Must come before JAX starts its devices; repeating it with the same number is harmless.
jax.config.update("jax_num_cpu_devices", 8)


@contextlib.contextmanager
def _compiles():
    seen = []

    def listen(event: str, duration_secs: float, **_) -> None:
        if event.endswith("backend_compile_duration"):
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.fixture(scope="session")
def compiles():
    """Counts what the backend really compiles: `with compiles() as done: ...; len(done)`."""
    return _compiles
