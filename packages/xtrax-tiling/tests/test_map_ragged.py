"""Mapping over elements of differing length."""

import functools
import gc
import itertools
import sys
import weakref
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.tiling import iter_ragged, map_ragged
from xtrax.tiling._ragged import programs

anything: Any = None


@pytest.fixture
def compiled(monkeypatch):
    """The `(length, batch)` of each program that is compiled."""
    shapes = []
    bounded_jit = programs.bounded_jit

    def counting(function, **options):
        def counted(consts, arrays, leaves, mask):
            shapes.append(mask.shape[::-1])  # runs when it is traced, once for each program that is compiled
            return function(consts, arrays, leaves, mask)

        return bounded_jit(counted, **options)

    monkeypatch.setattr(programs, "bounded_jit", counting)
    return shapes


def sums(item, mask):
    """A total, a result along the length, a mean without it, and the mask itself."""
    x = item["x"]
    kept = jnp.where(mask[:, None], x, 0)
    return {"total": kept.sum(), "steps": 2 * x, "mask": mask, "by column": kept.sum(axis=0), "id": item["id"]}


def by_loop(items):
    return [
        {
            "total": item["x"].sum(),
            "steps": 2 * item["x"],
            "mask": np.ones(len(item["x"]), bool),
            "by column": item["x"].sum(axis=0),
            "id": item["id"],
        }
        for item in items
    ]


def make_items(lengths, seed=0):
    rng = np.random.default_rng(seed)
    # Small whole numbers, whose sums are exact in any order.
    return [{"x": rng.integers(-9, 9, (n, 3)).astype(np.float32), "id": rng.integers(0, 9, n)} for n in lengths]


def check(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert result.keys() == wanted.keys()
        for name, value in result.items():
            assert isinstance(value, np.ndarray)
            assert value.shape == np.shape(wanted[name]), name
            np.testing.assert_array_equal(value, wanted[name])


@given(
    lengths=st.lists(st.integers(0, 8), max_size=20),
    boundaries=st.sampled_from([(8,), (3, 8), (1, 2, 5, 9)]),
    batch_size=st.sampled_from([1, 4]),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_results_are_those_of_a_loop_in_the_order_given(lengths, boundaries, batch_size, seed):
    items = make_items(lengths, seed)
    options: dict[str, Any] = {"boundaries": boundaries, "batch_size": batch_size}
    check(map_ragged(sums, items, **options), by_loop(items))
    yielded = dict(iter_ragged(sums, iter(items), **options))
    check([yielded[i] for i in range(len(items))], by_loop(items))


def test_one_program_is_compiled_for_each_boundary_that_is_used(compiled):
    def total(x, mask):
        return jnp.where(mask, x, 0).sum()

    items = [np.ones(n, np.float32) for n in (1, 2, 3, 9, 1, 2, 3, 2, 2)]
    options: dict[str, Any] = {"boundaries": (2, 4, 8, 16), "batch_size": 4}
    assert map_ragged(total, items, **options) == [1, 2, 3, 9, 1, 2, 3, 2, 2]
    assert sorted(compiled) == [(2, 4), (4, 4), (16, 4)]
    map_ragged(total, items * 3, **options)
    dict(iter_ragged(total, items, **options))
    assert len(compiled) == 3
    assert map_ragged(total, [np.ones(7, np.float32)], **options) == [7]
    assert compiled[3:] == [(8, 4)]
    map_ragged(total, [np.ones(7, np.int32)], **options)
    assert compiled[4:] == [(8, 4)]  # another dtype is another program


def test_a_function_made_anew_is_another_function_and_a_dead_one_is_forgotten(compiled):
    def made(scale):
        return lambda x, mask: x * scale

    items = [np.arange(3)]
    options: dict[str, Any] = {"boundaries": (4,), "batch_size": 2}
    first = made(jnp.int32(2))
    assert map_ragged(first, items, **options)[0].tolist() == [0, 2, 4]
    assert map_ragged(made(jnp.int32(-1)), items, **options)[0].tolist() == [0, -1, -2]
    assert len(compiled) == 2
    dead = weakref.ref(first)
    del first
    gc.collect()
    assert dead() is None


class Scale(eqx.Module):
    """An array, a number that is part of the program, and a function."""

    weight: jax.Array
    power: int
    activation: Any = eqx.field(static=True, default=jnp.abs)

    def __call__(self, x, mask):
        return self.activation(x * self.weight) ** self.power

    def negative(self, x, mask):
        return -x * self.weight


def test_modules_are_known_by_their_structure(compiled):
    items = [np.array([1.0, -2.0])]
    options: dict[str, Any] = {"boundaries": (2,), "batch_size": 1}

    def run(fn):
        return map_ragged(fn, items, **options)[0].tolist()

    assert run(Scale(jnp.float32(3), 1)) == [3, 6]
    assert run(Scale(jnp.float32(5), 1)) == [5, 10]
    assert len(compiled) == 1
    assert run(Scale(jnp.float32(3), 2)) == [9, 36]
    assert len(compiled) == 2
    assert run(Scale(jnp.float32(3), anything or True)) == [3, 6]  # True is not 1 to a function that looks
    assert len(compiled) == 3
    assert run(Scale(jnp.array([1.0, 2.0]), 1)) == [1, 4]
    assert len(compiled) == 4
    for weight in (2, 7):
        assert run(Scale(jnp.float32(weight), 1).negative) == [-weight, 2 * weight]
    assert len(compiled) == 5


class Plain:
    """A callable that is no tree, and a method of it."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, mask):
        return x * self.scale

    def halved(self, x, mask):
        return x // self.scale


class Unhashable(Plain):
    __hash__ = None


def test_methods_partials_and_callable_objects(compiled):
    items = [np.array([4, 6])]
    options: dict[str, Any] = {"boundaries": (2,), "batch_size": 1}

    def run(fn):
        return map_ragged(fn, items, **options)[0].tolist()

    double = Plain(jnp.int32(2))
    for _ in range(2):
        assert run(double) == [8, 12]
        assert run(double.halved) == [2, 3]
        assert run(Plain.__call__.__get__(double)) == [8, 12]
    assert len(compiled) == 3
    assert run(Unhashable(jnp.int32(3))) == [12, 18]

    def scaled(scale, x, mask, *, shift):
        return x * scale + shift

    del compiled[:]
    for scale in (2, 3):
        assert run(functools.partial(scaled, jnp.int32(scale), shift=1)) == [4 * scale + 1, 6 * scale + 1]
    assert len(compiled) == 1
    assert run(functools.partial(scaled, jnp.int32(2), shift=5)) == [13, 17]
    assert len(compiled) == 2


OFFSET = 1


def test_a_function_is_traced_anew_when_what_it_uses_is_replaced(compiled, monkeypatch):
    items, weights = [np.array([4, 6])], np.array([1, 2])

    def shifted(x, mask):
        return x * weights + OFFSET

    for fn in (shifted, functools.partial(lambda scale, x, mask: x * scale + OFFSET, jnp.array([1, 2]))):
        del compiled[:]
        for offset in (1, 1, 5):
            monkeypatch.setattr(sys.modules[__name__], "OFFSET", offset)
            assert map_ragged(fn, items, boundaries=(2,), batch_size=1)[0].tolist() == [4 + offset, 12 + offset]
        assert len(compiled) == 2
    weights = np.array([10, 10])
    assert map_ragged(shifted, items, boundaries=(2,), batch_size=1)[0].tolist() == [45, 65]


def test_arrays_are_arguments_and_not_compiled_in(monkeypatch):
    texts = []
    bounded_jit = programs.bounded_jit

    def keeping(function, **options):
        jitted = bounded_jit(function, max_traces=2)
        return lambda *args: (texts.append(jitted.lower(*args).as_text()), jitted(*args))[1]

    monkeypatch.setattr(programs, "bounded_jit", keeping)
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((64, 64)), jnp.float32)

    def closed(x, mask):
        return x @ matrix

    def looped(x, mask):
        return jax.lax.map(lambda row: row @ matrix, x)

    module = eqx.nn.Linear(64, 64, key=jax.random.key(0))
    items = [np.ones((3, 64), np.float32)]
    for fn in (closed, looped, lambda x, mask: x @ np.asarray(matrix), lambda x, mask: jax.vmap(module)(x)):
        map_ragged(fn, items, boundaries=(4,), batch_size=1)
        assert len(texts[-1]) < 10_000  # 4,096 constants in hexadecimal alone are 32,768 characters


def test_an_output_keeps_the_length_only_if_it_follows_it():
    def outputs(x, mask):
        return x, jnp.zeros((4,)), jnp.zeros((8, 2)), jnp.cumsum(x)[:, None], x[:4], x.sum()

    items = [np.arange(n) for n in (3, 6, 4)]
    for boundaries in ((4, 8), (8,), (4, 6, 8)):
        for item, result in zip(items, map_ragged(outputs, items, boundaries=boundaries, batch_size=2), strict=True):
            n = len(item)
            assert [leaf.shape for leaf in result] == [(n,), (4,), (8, 2), (n, 1), (4,), ()]


def test_a_function_of_lengths_up_to_its_only_boundary_keeps_them():
    positions = jnp.arange(4.0)

    def placed(x, mask):
        return x + positions[: len(x)]

    (result,) = map_ragged(placed, [np.zeros(3)], boundaries=(4,), batch_size=1)
    assert result.tolist() == [0, 1, 2]


def test_a_function_of_one_length_alone_returns_what_it_returns():
    weight = jnp.eye(4)

    def dense(x, mask):
        return weight @ x

    (result,) = map_ragged(dense, [np.array([1.0, 2.0])], boundaries=(4,), batch_size=1)
    assert result.tolist() == [1, 2, 0, 0]


def test_an_unused_boundary_that_the_function_cannot_take_is_no_matter():
    def windows(x, mask):
        return x.reshape(-1, 4).reshape(-1)

    (steps,) = map_ragged(windows, [np.arange(6)], boundaries=(3, 8), batch_size=1)
    assert steps.tolist() == [0, 1, 2, 3, 4, 5]


def test_every_axis_that_is_the_length_is_cut():
    def outer(x, mask):
        return x[:, None] * x[None, :], jnp.broadcast_to(x[None, :, None], (3, len(x), 8))

    items = [np.arange(1.0, 4), np.arange(5.0), np.arange(2.0)]
    for boundaries in ((8,), (4, 8)):
        results = map_ragged(outer, items, boundaries=boundaries, batch_size=2)
        for item, (square, middle) in zip(items, results, strict=True):
            np.testing.assert_array_equal(square, np.outer(item, item))
            np.testing.assert_array_equal(middle, np.broadcast_to(item[None, :, None], (3, len(item), 8)))


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda x, mask: jnp.diff(x), r"output has shape \(7,\) .* padded to 8, but \(3,\)"),
        (lambda x, mask: {"twice": jnp.repeat(x, 2)}, r"output\['twice'\] has shape \(16,\)"),
        (lambda x, mask: (x, x.reshape(-1, 2)), r"output\[1\] has shape \(4, 2\)"),
        (lambda x, mask: jnp.zeros((1,) * len(x)), "output has shape"),
        (lambda x, mask: [x[i] for i in range(len(x))], "fn returns PyTreeDef"),
    ],
)
@pytest.mark.parametrize("boundaries", [(8,), (4, 8)])
def test_padding_that_cannot_be_cut_is_refused(fn, found, boundaries, compiled):
    items = [np.array([1.0, 2.0, 4.0, 5.0, 6.0], np.float32)]
    with pytest.raises(ValueError, match=f"(?s){found}.*cannot be cut off; return arrays whose axes"):
        map_ragged(fn, items, boundaries=boundaries, batch_size=1)


def test_padding_and_mask_are_what_is_said():
    def seen(item, mask):  # in arrays of a size of their own, which are returned whole
        both = jnp.zeros(9, int).at[: 2 * len(mask)].set(jnp.concatenate([item["a"], item["b"]]))
        return both, jnp.zeros(9, bool).at[: len(mask)].set(mask)

    items = [{"a": np.array([5]), "b": np.array([6])}, {"a": np.array([], int), "b": np.array([], int)}]
    results = map_ragged(seen, items, boundaries=(2,), batch_size=3, pad_value={"a": -1, "b": 7})
    assert [leaf.tolist() for leaf in results[0]] == [[5, -1, 6, 7] + [0] * 5, [True] + [False] * 8]
    assert [leaf.tolist() for leaf in results[1]] == [[-1, -1, 7, 7] + [0] * 5, [False] * 9]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.complex64])
def test_dtypes_are_kept(dtype):
    items = [np.array([1, 0, 1]).astype(dtype), np.array([1]).astype(dtype)]
    for item, result in zip(items, map_ragged(lambda x, mask: x, items, boundaries=(4,), batch_size=2), strict=True):
        assert result.dtype == dtype
        assert result.tolist() == item.tolist()


def test_x64_and_what_else_a_trace_depends_on(compiled):
    def identity(x, mask):
        return x

    items = [np.array([1.5])]
    options: dict[str, Any] = {"boundaries": (1,), "batch_size": 1}
    assert map_ragged(identity, items, **options)[0].dtype == np.float32
    with jax.enable_x64(True):
        assert map_ragged(identity, items, **options)[0].dtype == np.float64
    with jax.default_matmul_precision("float32"):
        map_ragged(identity, items, **options)
    map_ragged(identity, items, **options)
    assert len(compiled) == 3


def test_keys_as_results():
    def keys(x, mask):
        return jax.random.split(jax.random.key(0), len(x)), jax.random.key(7)

    ((split, one),) = map_ragged(keys, [np.zeros(3)], boundaries=(4, 8), batch_size=1)
    assert (jax.random.key_data(split) == jax.random.key_data(jax.random.split(jax.random.key(0), 4)[:3])).all()
    assert (jax.random.key_data(one) == jax.random.key_data(jax.random.key(7))).all()


def test_results_are_arrays_of_their_own():
    items = [np.zeros(2), np.zeros(2)]
    first, second = map_ragged(lambda x, mask: x, items, boundaries=(4,), batch_size=2)
    first[:] = 9
    assert second.tolist() == [0, 0]
    assert first.base is None


def test_jax_arrays_and_tuples_of_items():
    items = ((jnp.arange(2.0), None), (jnp.arange(3.0), None))
    results = map_ragged(lambda item, mask: item[0] * 2, items, boundaries=(4,), batch_size=2)
    assert [r.tolist() for r in results] == [[0, 2], [0, 2, 4]]


def test_no_items():
    assert map_ragged(lambda x, mask: x, [], boundaries=(4,), batch_size=2) == []
    assert list(iter_ragged(lambda x, mask: x, [], boundaries=(4,), batch_size=2)) == []


def test_the_iterator_takes_no_item_before_the_last_batch_is_yielded():
    taken = []

    def endless():
        for i in itertools.count():
            taken.append(i)
            yield np.full(1 + 2 * (i % 2), i)

    results = iter_ragged(lambda x, mask: x, endless(), boundaries=(2, 4), batch_size=2)
    assert taken == []
    order = [(position, value.tolist()) for position, value in itertools.islice(results, 6)]
    assert order == [(0, [0]), (2, [2]), (1, [1] * 3), (3, [3] * 3), (4, [4]), (6, [6])]
    assert taken == list(range(7))


def test_the_iterator_holds_the_results_of_one_batch():
    marks = 12_345  # a size that no other array has

    def large(x, mask):
        return jnp.full(marks, x.sum())

    def held():
        return sum(array.shape == (2, marks) for array in jax.live_arrays())

    items = [np.full(1, i, np.float32) for i in range(8)]
    most = 0
    for position, result in iter_ragged(large, items, boundaries=(1,), batch_size=2):
        assert result[0] == position
        most = max(most, held())
    assert most == 1
    gc.collect()
    assert held() == 0


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([np.ones(2), np.ones(9)], ValueError, r"items\[1\] has length 9, past the last boundary 8"),
        ([np.ones(2), np.float32(1)], ValueError, r"items\[1\] is a scalar"),
        ([np.ones(2), 3], ValueError, r"items\[1\] is a scalar"),
        ([None], ValueError, r"items\[0\] has no arrays"),
        ([{"a": np.ones(2), "b": np.ones(3)}], ValueError, r"items\[0\]\['a'\] has length 2.*\['b'\] has length 3"),
        ([np.ones(2), {"a": np.ones(2)}], ValueError, r"items\[1\] has the structure"),
        ([np.ones(2), np.ones(2, int)], ValueError, r"items\[1\] has dtype int64.*float64"),
        (
            [np.arange(2), np.full(3, 2**40)],
            ValueError,
            r"items\[1\] is int64 and holds 1099511627776, which int32 cannot",
        ),
        ([{"id": np.full(2, 2**32, np.uint64)}], ValueError, r"items\[0\]\['id'\] is uint64 and holds 4294967296"),
        ([np.ones((2, 3)), np.ones((2, 4))], ValueError, r"items\[1\] .* shape \(2, 4\).* \(length, 3\)"),
        ([np.ones(2), np.array(["a"])], TypeError, r"items\[1\] must be a numeric"),
        ([np.ones(2), np.array([None])], TypeError, r"items\[1\] must be a numeric"),
        ([np.ma.masked_array([1.0], [True])], TypeError, r"items\[0\] is a masked array"),
        (np.ones((2, 3)), TypeError, "items must be a list of pytrees of arrays.*tiled_vmap"),
        (jnp.ones((2, 3)), TypeError, "items must be a list"),
        ({"a": np.ones(2)}, TypeError, "items must be a list"),
        ("ab", TypeError, "items must be a list"),
        (3, TypeError, "items must be a list"),
        (None, TypeError, "items must be a list"),
    ],
)
def test_bad_items_are_refused_before_any_trace(items, error, message):
    def untraced(x, mask):
        raise AssertionError("traced")

    with pytest.raises(error, match=message):
        map_ragged(untraced, items, boundaries=(4, 8), batch_size=2)
    with pytest.raises(error, match=message):
        list(iter_ragged(untraced, items, boundaries=(4, 8), batch_size=2))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"fn": 3}, TypeError, "fn must be callable"),
        ({"boundaries": ()}, ValueError, "boundaries is empty"),
        ({"boundaries": (4, 4)}, ValueError, "strictly ascending"),
        ({"boundaries": (True,)}, TypeError, "must be an integer"),
        ({"boundaries": 4}, TypeError, "must be a sequence"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": True}, TypeError, "batch_size must be an integer"),
        ({"batch_size": 2.0}, TypeError, "batch_size must be an integer"),
    ],
)
def test_bad_options_are_refused_at_once(change, error, message):
    arguments: dict[str, Any] = {"fn": lambda x, mask: x, "boundaries": (4,), "batch_size": 2} | change
    for run in (map_ragged, iter_ragged):
        with pytest.raises(error, match=message):
            run(arguments["fn"], [], boundaries=arguments["boundaries"], batch_size=arguments["batch_size"])


@pytest.mark.parametrize(
    ("pad_value", "error", "message"),
    [
        (0.5, ValueError, r"pad_value 0.5 does not fit items\[0\]\['x'\] of dtype int32"),
        ("0", TypeError, "must be a number"),
        ({"y": 0}, ValueError, r"prefix of items\[0\]"),
        ({"x": np.nan}, ValueError, "does not fit"),
        (2**40, ValueError, "does not fit"),
    ],
)
def test_bad_pad_values_are_refused(pad_value, error, message):
    with pytest.raises(error, match=message):
        map_ragged(lambda x, mask: x, [{"x": np.arange(2)}], boundaries=(4,), batch_size=2, pad_value=pad_value)


def test_tracers_are_refused_and_do_no_harm(compiled):
    items = [np.ones(2, np.float32)]
    options: dict[str, Any] = {"boundaries": (4,), "batch_size": 2}

    def double(x, mask):
        return 2 * x

    def scaled(weight):
        return map_ragged(lambda x, mask: weight * x, items, **options)[0].sum()

    def held(weight):
        return map_ragged(Scale(weight, 1), items, **options)[0].sum()

    with pytest.raises(TypeError, match=r"items\[0\] is being traced"):
        jax.jit(lambda x: map_ragged(double, [x], **options))(jnp.ones(2))
    for fn in (scaled, held):
        with pytest.raises(TypeError, match="fn holds a value that is being traced"):
            jax.grad(fn)(1.0)
    with pytest.raises(TypeError, match="map_ragged was called inside"):
        jax.jit(lambda _: map_ragged(double, items, **options))(0)
    assert map_ragged(double, items, **options)[0].tolist() == [2, 2]


def test_what_fn_raises_reaches_the_caller():
    def failing(x, mask):
        raise ZeroDivisionError("from fn")

    with pytest.raises(ZeroDivisionError, match="from fn"):
        map_ragged(failing, [np.ones(2)], boundaries=(4,), batch_size=2)
