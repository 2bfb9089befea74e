"""`xtrax export`: what is written is the function, for other programs to call."""

import jax
import jax.export
import numpy as np
import pytest

from xtrax.cli import main

CODE = """
import jax
import jax.numpy as jnp
import equinox as eqx

WEIGHTS = jnp.arange(12.0).reshape(3, 4)

def linear(x, bias):
    return {"y": x @ WEIGHTS + bias["b"]}

def draw(key, *, scale):
    return scale * jax.vmap(jax.random.normal)(key)

def talks(x):
    jax.debug.print("{}", x)
    return x

def halts(x):
    raise ValueError("no such thing")

def needs(x, steps):
    return x

model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
"""


@pytest.fixture
def module(project):
    (project.folder / f"fns_{project.module}.py").write_text(CODE)
    return f"fns_{project.module}"


def test_serialized_bytes_call_the_function_without_its_code(project, module):
    shapes = "x=(5,3)f32 bias.b=(4,)f32"
    assert project.xtrax(
        "export", "--fn", f"{module}:linear", "--shapes", shapes, "--serialized", "--out", "f.bin"
    ) == (
        0,
        "",
        "",
    )
    exported = jax.export.deserialize(bytearray((project.folder / "f.bin").read_bytes()))
    x, b = np.ones((5, 3), "float32"), np.full(4, 2, "float32")
    expected = x @ np.arange(12, dtype="float32").reshape(3, 4) + 2
    np.testing.assert_allclose(exported.call(x, {"b": b})["y"], expected)


def test_text_is_the_stablehlo_of_jax(project, module):
    code, out, err = project.xtrax("export", "--fn", "jax.numpy:sin", "--shapes", "x=(4,3)f32")
    assert (code, err) == (0, "")
    assert out == jax.jit(jax.numpy.sin).lower(jax.ShapeDtypeStruct((4, 3), "float32")).as_text()
    assert project.xtrax("export", "--fn", "jax.numpy:sin", "--shapes", "x=(4,3)f32", "--out", "sin.mlir")[1] == ""
    assert (project.folder / "sin.mlir").read_text() == out


def test_keys_keyword_only_arguments_and_modules_with_arrays(project, module):
    shapes = "scale=()f32 key=(3,)key"
    assert (
        project.xtrax("export", "--fn", f"{module}:draw", "--shapes", shapes, "--serialized", "--out", "d.bin")[0] == 0
    )
    exported = jax.export.deserialize(bytearray((project.folder / "d.bin").read_bytes()))
    keys = jax.random.split(jax.random.key(1), 3)
    np.testing.assert_allclose(
        exported.call(keys, scale=np.float32(2)), 2 * jax.vmap(jax.random.normal)(keys), rtol=1e-6
    )
    code, out, _ = project.xtrax("export", "--fn", f"{module}:model", "--shapes", "x=(3,)f32")
    assert code == 0
    assert "tensor<2xf32>" in out


@pytest.mark.parametrize(
    ("fn", "shapes", "message"),
    [
        ("talks", "x=(3,)f32", "calls back into Python"),
        ("halts", "x=(3,)f32", "fails for these shapes: ValueError: no such thing (fns_"),
        ("linear", "x=(5,3)f32 bias.b=(7,)f32", "fails for these shapes: ValueError: Incompatible shapes"),
        ("linear", "x=(5,3)f32", "needs bias too; add the shape, such as bias="),
        ("linear", "x=(5,3)f32 bais.b=(4,)f32", "has no argument 'bais' to give a shape to; did you mean bias?"),
        ("needs", "x=(3,)f32", "needs steps too"),
        ("linaer", "x=(5,3)f32", "did you mean"),
        ("linear", "x=(5,3)f64 bias.b=(4,)f32", "x is float64, but jax has 64 bits switched off; set JAX_ENABLE_X64=1"),
        ("linear", "x=(5,3)f32 bias.b=(4,)i64", "b is int64, but jax has 64 bits switched off"),
    ],
)
def test_what_cannot_be_exported_is_told_in_a_line_and_leaves_nothing(project, module, fn, shapes, message):
    before = {path for path in project.folder.rglob("*") if "__pycache__" not in path.parts}
    code, out, err = project.xtrax("export", "--fn", f"{module}:{fn}", "--shapes", shapes, "--serialized", "--out", "o")
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert {path for path in project.folder.rglob("*") if "__pycache__" not in path.parts} == before


def test_effects_can_be_exported_as_text(project, module):
    code, out, _ = project.xtrax("export", "--fn", f"{module}:talks", "--shapes", "x=(3,)f32")
    assert code == 0
    assert "callback" in out


def test_a_class_a_missing_folder_and_a_folder_as_file(project, module, capsys):
    arguments = ["export", "--shapes", "x=(3,)f32"]
    assert main([*arguments, "--fn", "equinox.nn:Linear"]) == 2
    assert "is a class; name a function of arrays" in capsys.readouterr().err
    assert main([*arguments, "--fn", "jax.numpy:sin", "--out", "no/such/folder.mlir"]) == 2
    assert "cannot write no/such/folder.mlir: No such file or directory" in capsys.readouterr().err
    (project.folder / "folder").mkdir()
    assert main([*arguments, "--fn", "jax.numpy:sin", "--out", "folder"]) == 2
    assert "cannot write folder" in capsys.readouterr().err
    assert [path.name for path in project.folder.iterdir() if path.suffix == ".tmp"] == []
