"""Typed PRNG keys as carries and as outputs of a tiled run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.run import SinkSpec, open_results, run_tiled
from xtrax.tiling import AxisSpec, BatchPlanner, CarrySpec

pytestmark = pytest.mark.filterwarnings("ignore:the code's git commit:UserWarning")
N = 12
VALUES = np.arange(N, dtype=np.float32)


def noisy(impl):
    def transition(key, y):
        key, own = jax.random.split(key)
        return key, {"noisy": y + jax.random.normal(own), "key": own}

    carry = CarrySpec("n", jax.random.key(3, impl=impl), transition)
    return BatchPlanner(carry_specs=[carry]).plan([AxisSpec("n", N, N)])


def expected(impl):
    key, noise, keys = jax.random.key(3, impl=impl), [], []
    for value in VALUES:
        key, own = jax.random.split(key)
        noise.append(value + jax.random.normal(own))
        keys.append(jax.random.key_data(own))
    return np.stack(noise), np.stack(keys), jax.random.key_data(key)


class Failing:
    shape, dtype = VALUES.shape, VALUES.dtype

    def __len__(self):
        return N

    def __getitem__(self, index):
        if index.stop > 8:
            raise OSError("lost")
        return VALUES[index]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_is_carried_from_tile_to_tile_and_over_a_stop(impl, tmp_path):
    noise, keys, last = expected(impl)
    options = {"plan": noisy(impl), "tile_size": 4, "progress": "off"}
    with pytest.raises(OSError, match="lost"):
        run_tiled(lambda x: x, Failing(), sink=SinkSpec(tmp_path / "out"), **options)
    report = run_tiled(lambda x: x, VALUES, sink=SinkSpec(tmp_path / "out"), **options)
    assert (report.tiles_skipped, report.tiles_done) == (2, 1)
    results = open_results(tmp_path / "out")
    np.testing.assert_allclose(results["noisy"][:], noise, rtol=1e-6)
    np.testing.assert_array_equal(results["key"][:], keys)  # Zarr holds no keys
    np.testing.assert_array_equal(results["carries/n"][:], last)


def test_without_a_sink_keys_stay_keys():
    noise, keys, last = expected("rbg")
    outputs, carries = run_tiled(lambda x: x, VALUES, plan=noisy("rbg"), tile_size=4, progress="off").outputs
    np.testing.assert_allclose(outputs["noisy"], noise, rtol=1e-6)
    assert jnp.issubdtype(outputs["key"].dtype, jax.dtypes.prng_key)
    assert jax.random.key_impl(outputs["key"]) == jax.random.key_impl(jax.random.key(0, impl="rbg"))
    np.testing.assert_array_equal(jax.random.key_data(outputs["key"]), keys)
    np.testing.assert_array_equal(jax.random.key_data(carries["n"]), last)


@pytest.mark.parametrize("raw", [np.array([0, 3], np.uint32), "of jax"], ids=["numpy", "jax"])
def test_a_raw_key_gives_what_the_typed_one_gives(raw):
    key = jax.random.PRNGKey(3) if isinstance(raw, str) else raw
    options = {"specs": [AxisSpec("n", N, 5)], "tile_size": 5, "progress": "off"}
    report = run_tiled(lambda x, key: x + jax.random.normal(key), VALUES, key=key, **options)
    keys = [jax.random.fold_in(jax.random.key(3, impl="threefry2x32"), i) for i in range(N)]
    np.testing.assert_allclose(report.outputs, VALUES + [float(jax.random.normal(key)) for key in keys], rtol=1e-5)
