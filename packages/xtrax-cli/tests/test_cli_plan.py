"""`xtrax plan` and `xtrax explain`: the plan of the planner, with the compiler's numbers, in each form."""

import html
import importlib
import json
import os
import pty
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from xtrax.cli import main
from xtrax.cli._bytes import format_bytes, parse_bytes
from xtrax.eda import explain_plan, render
from xtrax.inference import infer_bundle
from xtrax.tiling import AxisSpec, BatchPlanner, RemainderWarning

CODE = """
import jax
import jax.numpy as jnp
from xtrax.inference import AxisOverride, axis_config

WEIGHTS = jnp.ones((16, 64))

def mlp(x):
    return jnp.tanh(x @ WEIGHTS) @ WEIGHTS.T

@axis_config(AxisOverride("batch", default_batch_size=100))
def known(x):
    return mlp(x)

@axis_config(AxisOverride("items", default_batch_size=10, heterogeneous=True))
def ragged(x):
    return x

@axis_config(AxisOverride("a", 10), AxisOverride("b", 10))
def same_sizes(x, y):
    return x, y

def two(x, y):
    return x.sum(-1), y.sum(-1)

def tree(batch, *, scale):
    return {"out": batch["x"] * scale, "mask": batch["mask"]}

def dot(x, y):
    return jnp.dot(x, y)

def pair(x, y):
    return mlp(x * y)

def fixed(x):
    return x.reshape(64, 16)

def scalar(x):
    return 2 * x
"""


@pytest.fixture
def module(project):
    name = f"fns_{project.module}"
    (project.folder / f"{name}.py").write_text(CODE)
    return name


def as_json(project, *arguments, code=0):
    found, out, err = project.xtrax(*arguments)
    assert found == code, err
    return json.loads(out)


def plan(project, module, fn, shapes, *options, code=0):
    return as_json(project, "plan", "--fn", f"{module}:{fn}", "--shapes", shapes, "--json", *options, code=code)


def axes(document):
    return [(a["name"], a["cardinality"], a["strategy"], a["batch_size"]) for a in document["axes"]]


@pytest.mark.parametrize(
    ("fn", "options", "wanted"),
    [
        ("mlp", [], ("axis_0", 1000, "Vmap", 1000)),
        ("mlp", ["--batch-size", "64"], ("axis_0", 1000, "SafeMap", 64)),
        ("mlp", ["--batch-size", "5000"], ("axis_0", 1000, "Vmap", 1000)),
        ("known", [], ("batch", 1000, "SafeMap", 100)),
        ("known", ["--batch-size", "64"], ("batch", 1000, "SafeMap", 64)),
    ],
)
def test_axes_are_known_or_become_so_with_that_batch_size_or_all_at_once(project, module, fn, options, wanted):
    document = plan(project, module, fn, "x=(1000,16)f32", *options)
    assert axes(document) == [wanted]
    assert document["inputs"] == {"x": "float32[1000,16]"}
    assert document["outputs"] == {"output": "float32[1000,16]"}
    name, size, _, batch = wanted
    default = int(options[1]) if options else batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemainderWarning)
        decided = BatchPlanner().plan([AxisSpec(name, size, default)])
    assert document["axes"][0]["reasoning"] == decided.decisions[0].reasoning
    assert [("independent" in note) for note in document["notes"]] == ([True] if fn == "mlp" else [])


def test_axes_of_one_size_are_noted(project, module):
    document = plan(project, module, "two", "x=(40,3)f32 y=(40,2)f32")
    assert axes(document) == [("axis_0", 40, "Vmap", 40), ("axis_1", 40, "Vmap", 40)]
    assert "axis_0 and axis_1 have 40 elements each" in document["notes"][1]


def test_dicts_keyword_only_arguments_and_scalars(project, module):
    document = plan(project, module, "tree", "batch.x=(8,3)f32 batch.mask=(8,)bool scale=()f32")
    assert document["inputs"] == {"batch.mask": "bool[8]", "batch.x": "float32[8,3]", "scale": "float32[]"}
    assert document["outputs"] == {"mask": "bool[8]", "out": "float32[8,3]"}
    assert [size for _, size, _, _ in axes(document)] == [8, 8]
    document = plan(project, module, "scalar", "x=()f32")
    assert document["axes"] == []
    assert "nothing to plan" in project.xtrax("plan", "--fn", f"{module}:scalar", "--shapes", "x=()f32")[1]


def compiled_bytes(fn, *shapes):
    """Arguments, outputs and temporaries by XLA's account."""
    found: Any = (
        jax.jit(fn).lower(*(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)).compile().memory_analysis()
    )
    return found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes


def test_a_budget_is_kept_by_the_compilers_account(project, module):
    def mlp(x, weights):
        return jnp.tanh(x @ weights) @ weights.T

    whole = 2 * 4000 * 16 * 4  # the arguments and outputs of all elements
    document = plan(project, module, "mlp", "x=(4000,16)f32", "--budget", "800kB")
    ((name, size, strategy, chunk),) = axes(document)
    assert (name, size, strategy) == ("axis_0", 4000, "SafeMap")
    assert document["memory"]["budget"] == 800_000
    assert document["memory"]["estimate"] == whole + compiled_bytes(mlp, (chunk, 16), (16, 64)) <= 800_000
    # The next larger chunk, so one chunk fewer, does not fit.
    larger = -(-4000 // (-(-4000 // chunk) - 1))
    assert whole + compiled_bytes(mlp, (larger, 16), (16, 64)) > 800_000
    assert document["fits"] is True
    assert document["memory"]["compiles"] > 1
    roomy = plan(project, module, "mlp", "x=(4000,16)f32", "--budget", "1GiB")
    assert axes(roomy) == [("axis_0", 4000, "Vmap", 4000)]
    assert roomy["memory"]["estimate"] == compiled_bytes(mlp, (4000, 16), (16, 64))


@pytest.mark.parametrize("verb", ["plan", "explain"])
def test_an_infeasible_plan_is_shown_and_exits_with_1(project, module, verb):
    arguments = [verb, "--fn", f"{module}:known", "--shapes", "x=(4000,16)f32", "--budget", "100kB"]
    code, out, err = project.xtrax(*arguments, *(["--json"] if verb == "plan" else []))
    assert code == 1
    document = json.loads(out)
    assert document["fits"] is False
    assert axes(document) == [("batch", 4000, "SafeMap", 100)]
    assert "the budget is 100000 bytes" in err
    assert "Lower --batch-size, or raise --budget." in err
    assert err.count("\n") == 1
    if verb == "explain":
        code, out, again = project.xtrax(*arguments, "--fmt", "html")
        assert (code, again) == (1, err)  # said once, not by the page's logger too
        assert "</html>" in out
    code, _, err = project.xtrax("plan", "--fn", f"{module}:mlp", "--shapes", "x=(40,16)f32", "--budget", "1kB")
    assert code == 1
    assert "Raise --budget." in err  # there is no smaller chunk than one element


def test_budget_device_is_that_of_the_device(project, module):
    document = plan(project, module, "mlp", "x=(10,16)f32", "--budget", "device")
    assert axes(document) == [("axis_0", 10, "Vmap", 10)]
    assert document["memory"]["budget"] > 10**6


def test_a_function_of_one_element_is_planned_as_a_nest(project, module):
    where = ["--per-element", "--axes", "x=a,b y=b"]
    document = plan(project, module, "dot", "x=(5,4,3)f32 y=(4,3)f32", *where)
    assert axes(document) == [("a", 5, "Vmap", 5), ("b", 4, "Vmap", 4)]
    assert document["outputs"] == {"output": "float32[5,4]"}
    assert document["notes"] == []
    document = plan(project, module, "dot", "x=(200,3)f32 y=(100,3)f32", "--per-element", "--axes", "x=a y=b")
    assert document["outputs"] == {"output": "float32[200,100]"}
    assert axes(document) == [("a", 200, "Vmap", 200), ("b", 100, "Vmap", 100)]


def test_a_nest_is_cut_in_its_order_until_it_fits(project, module):
    where = ["--per-element", "--axes", "x=a y=b", "--budget"]
    document = plan(project, module, "pair", "x=(200,16)f32 y=(100,16)f32", *where, "4MB")
    (_, _, kind_a, chunk_a), (_, _, kind_b, chunk_b) = axes(document)
    assert (kind_a, kind_b, chunk_b) == ("SafeMap", "Vmap", 100)

    def chunk(x, y, weights):
        return jnp.tanh((x[:, None] * y) @ weights) @ weights.T

    whole = (200 * 16 + 100 * 16 + 200 * 100 * 16) * 4
    needed = whole + compiled_bytes(chunk, (chunk_a, 16), (100, 16), (16, 64))
    assert document["memory"]["estimate"] == pytest.approx(needed, rel=0.02)
    assert document["memory"]["estimate"] <= 4_000_000
    assert whole + compiled_bytes(chunk, (2 * chunk_a, 16), (100, 16), (16, 64)) > 4_000_000
    both = plan(project, module, "pair", "x=(200,16)f32 y=(100,16)f32", *where, "1400kB")
    assert [strategy for _, _, strategy, _ in axes(both)] == ["SafeMap", "Vmap"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--axes", "x=a,a"], "--axes gives 'x' an axis twice"),
        (["--axes", "x=a x=b"], "--axes names 'x' twice"),
        (["--axes", "z=a"], "--axes names 'z', but --shapes has x, y"),
        (["--axes", "x:a"], "--axes must be entries"),
        (["--axes", ""], "--axes is empty"),
        (["--axes", "x=a,b,c"], "--axes gives 'x' a,b,c, but x has 2 dimensions"),
        (["--axes", "x=a y=a"], "--axes: 'a' has 200 elements in x, and 100 in y"),
    ],
)
def test_faulty_axes_are_usage_errors(project, module, options, message):
    shapes = "x=(200,3)f32 y=(100,3)f32"
    code, out, err = project.xtrax("plan", "--fn", f"{module}:dot", "--shapes", shapes, "--per-element", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("fn", "shapes", "options", "message"),
    [
        ("mlp", "x=(10,17)f32", [], "fails for these shapes: TypeError: "),
        ("mlp", "y=(10,16)f32", [], "has no argument 'y' to give a shape to; it takes x"),
        ("two", "x=(10,16)f32", [], "needs y too"),
        ("ragged", "x=(10,16)f32", [], "axis 'items' is heterogeneous"),
        ("fixed", "x=(1024,)f32", ["--budget", "7kB"], "fails for 16 of axis_0 at once: TypeError"),
        ("same_sizes", "x=(20,3)f32 y=(20,3)f32", ["--budget", "1MB"], "cannot be told apart by their sizes"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_line(project, module, fn, shapes, options, message):
    for verb in ("plan", "explain"):
        code, out, err = project.xtrax(verb, "--fn", f"{module}:{fn}", "--shapes", shapes, *options)
        assert (code, out) == (2, "")
        assert message in err
        assert err.count("\n") == 1


def test_a_fault_in_the_shapes_is_shown_by_a_caret(project, module):
    code, out, err = project.xtrax("plan", "--fn", f"{module}:mlp", "--shapes", "x=(10,16)f33")
    assert (code, out) == (2, "")
    first, shown, caret, *grammar = err.splitlines()
    assert first == "xtrax: there is no dtype 'f33'; did you mean f32?"
    assert shown[caret.index("^") :] == "f33"
    assert "name=(d0,d1,...)dtype" in grammar[0]


def test_the_table_has_a_line_for_each_axis_in_a_pipe_and_colours_on_a_terminal(project, module):
    arguments = ["plan", "--fn", f"{module}:known", "--shapes", "x=(1001,16)f32", "--budget", "1GB"]
    code, out, err = project.xtrax(*arguments)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:2] == [f"{module}:known, of a batch", "  (x: float32[1001,16]) -> float32[1001,16]"]
    header = next(i for i, line in enumerate(lines) if line.startswith("axis "))
    assert lines[header].split() == ["axis", "size", "strategy", "at", "once", "steps", "because"]
    assert lines[header + 1].split()[:5] == ["batch", "1001", "Vmap", "1001", "1"]
    assert re.search(r"^memory  \S+ kB of 1 GB, 0 % of it; \d programs compiled", out, re.MULTILINE)
    assert "\x1b[" not in out
    assert all(line == line.rstrip() for line in lines)

    terminal, theirs = pty.openpty()
    program = [sys.executable, "-c", "import sys; from xtrax.cli import main; sys.exit(main())", *arguments]
    process = subprocess.Popen(program, stdout=theirs, env={**os.environ, "TERM": "xterm", "COLUMNS": "80"})
    os.close(theirs)
    text = ""
    while True:
        try:
            if not (data := os.read(terminal, 65536)):
                break
        except OSError:  # the process has closed its side
            break
        text += data.decode()
    os.close(terminal)
    assert process.wait(60) == 0
    assert "\x1b[" in text
    assert max(len(re.sub(r"\x1b\[[0-9;]*m", "", line)) for line in text.splitlines()) <= 81


def test_explain_is_one_json_object_by_default(project, module):
    code, out, err = project.xtrax("explain", "--fn", f"{module}:known", "--shapes", "x=(1000,16)f32")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["_meta"]["schema_version"] == 1
    assert document["_meta"]["fn"] == f"{module}:known"
    assert document["_meta"]["shapes"] == "x=(1000,16)f32"
    stats = explain_plan(BatchPlanner().plan([AxisSpec("batch", 1000, 100)]))
    assert document["strategy_counts"] == stats.strategy_counts == {"SafeMap": 1}
    assert document["total_axes"] == 1
    assert document["axes"][0]["reasoning"] == stats.axes[0].reasoning != ""
    assert document["fits"] is None


def test_explain_as_text_html_and_png(project, module):
    arguments = ["explain", "--fn", f"{module}:known", "--shapes", "x=(1000,16)f32", "--fmt"]
    plan = BatchPlanner().plan([AxisSpec("batch", 1000, 100)])
    code, out, _ = project.xtrax(*arguments, "text")
    assert code == 0
    assert str(explain_plan(plan)) in out
    code, out, _ = project.xtrax(*arguments, "html", "--out", "plan.html")
    assert (code, out) == (0, "")
    page = (project.folder / "plan.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>")
    assert html.escape(plan.decisions[0].reasoning) in page
    assert f"{module}:known" in page
    assert project.xtrax(*arguments, "html")[1].lstrip().lower().startswith("<!doctype html>")
    pytest.importorskip("matplotlib")
    code, out, _ = project.xtrax(*arguments, "png", "--out", "plan.png")
    assert (code, out) == (0, "")
    assert (project.folder / "plan.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert isinstance(render(plan, "png"), bytes)


def test_png_without_matplotlib_tells_what_to_install(project, module, monkeypatch):
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, name, None)
    arguments = ["explain", "--fn", f"{module}:known", "--shapes", "x=(1000,16)f32", "--fmt", "png", "--out", "p.png"]
    code, out, err = project.xtrax(*arguments)
    assert (code, out) == (2, "")
    assert "matplotlib" in err
    assert "viz" in err
    assert not (project.folder / "p.png").exists()


def test_a_file_that_cannot_be_written(project, module, capsys):
    arguments = ["explain", "--fn", f"{module}:known", "--shapes", "x=(1000,16)f32"]
    assert main([*arguments, "--out", "no/such/folder.json"]) == 2
    assert "cannot write no/such/folder.json: No such file or directory" in capsys.readouterr().err


def test_the_command_plans_as_the_library_does(project, module):
    document = plan(project, module, "known", "x=(1000,16)f32")
    known = importlib.import_module(module).known
    _, specs = infer_bundle(known, [jax.ShapeDtypeStruct((1000, 16), "float32")])
    stats = explain_plan(BatchPlanner().plan(specs))
    assert document["axes"][0]["steps"] == stats.axes[0].steps == 10


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GB", 2 * 10**9),
        ("1GiB", 2**30),
        ("1.5 kib", 1536),
        ("0.1kB", 100),
        ("4096", 4096),
        ("7b", 7),
        ("1TB", 10**12),
    ],
)
def test_amounts_of_memory(text, count):
    assert parse_bytes(text, "--budget") == count


def test_amounts_of_memory_as_told():
    assert [format_bytes(n) for n in (1, 999, 1000, 16_777_216, 2 * 10**9, 5 * 10**15)] == [
        "1 B",
        "999 B",
        "1 kB",
        "16.8 MB",
        "2 GB",
        "5e+03 TB",
    ]
