"""The shim around `io_callback`: what it accepts is what the package's metadata says it accepts."""

import importlib
import importlib.metadata
import sys

import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from xtrax.stages import _callback
from xtrax.stages._callback import IoCallbackSignatureError, check_io_callback, io_callback


def _jax_requirements():
    texts = importlib.metadata.requires("xtrax-stages") or []
    return [r for r in map(Requirement, texts) if r.name in ("jax", "jaxlib")]


@pytest.mark.parametrize("name", ["jax", "jaxlib"])
def test_the_range_is_that_of_the_metadata(name):
    (requirement,) = [r for r in _jax_requirements() if r.name == name]
    bounds = {s.operator: Version(s.version) for s in requirement.specifier}
    assert bounds == {
        ">=": Version(".".join(map(str, _callback.MIN_JAX))),
        "<": Version(".".join(map(str, _callback.UNSUPPORTED_JAX))),
    }


@pytest.mark.parametrize("version", ["0.10.1", "0.10.2", "0.10.99", "0.11.0", "0.12.0.1", "0.12.99", "0.13.0", "1.0.0"])
def test_versions_are_judged_as_the_metadata_judges_them(version):
    (requirement,) = [r for r in _jax_requirements() if r.name == "jax"]
    number = tuple(map(int, version.split(".")))
    if requirement.specifier.contains(version):
        check_io_callback(number, io_callback)
    else:
        with pytest.raises(IoCallbackSignatureError, match=rf"supports jax>=0\.10\.2,<0\.13, and found jax {version}"):
            check_io_callback(number, io_callback)


def _renamed(callback, result_shape_dtypes, *args, sharding=None, order=False, **kwargs): ...
def _without_order(callback, result_shape_dtypes, *args, sharding=None, **kwargs): ...
def _positional(callback, result_shape_dtypes, sharding=None, ordered=False, *args, **kwargs): ...
def _undefaulted(callback, result_shape_dtypes, *args, sharding=None, ordered, **kwargs): ...
def _extended(callback, result_shape_dtypes, *args, sharding=None, ordered=False, extra=0, **kwargs): ...


@pytest.mark.parametrize("function", [_renamed, _without_order, _positional, _undefaulted, _extended])
def test_another_signature_is_refused_and_both_are_shown(function):
    with pytest.raises(IoCallbackSignatureError, match=r"has the parameters \(callback, .*knows \(callback, .*ordered"):
        check_io_callback(jax.__version_info__, function)


def test_a_signature_that_cannot_be_read_is_refused():
    with pytest.raises(IoCallbackSignatureError, match="cannot be read"):
        check_io_callback(jax.__version_info__, object())  # ty: ignore[invalid-argument-type]


@pytest.fixture
def reimported():
    """Import the shim again, as a first import would."""
    kept = sys.modules.pop("xtrax.stages._callback")
    yield lambda: importlib.import_module("xtrax.stages._callback")
    sys.modules["xtrax.stages._callback"] = kept


def test_seed_shim_checks_the_version_at_import(reimported, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 0))
    with pytest.raises(ImportError, match=r"found jax 0\.13\.0") as caught:
        reimported()
    assert type(caught.value).__name__ == "IoCallbackSignatureError"


def test_seed_shim_checks_the_signature_at_import(reimported, monkeypatch):
    monkeypatch.setattr(jax.experimental, "io_callback", _renamed)
    with pytest.raises(ImportError, match="knows") as caught:
        reimported()
    assert type(caught.value).__name__ == "IoCallbackSignatureError"


def test_seed_shim_is_jax_own_io_callback():
    seen = []
    doubled = jax.jit(lambda x: io_callback(lambda v: (seen.append(v), v * 2)[1], jax.ShapeDtypeStruct((), x.dtype), x))
    assert float(doubled(jnp.float32(3.0))) == 6.0
    np.testing.assert_array_equal(seen, [3.0])
