"""The graph verbs: verdicts in the file, one JSON object on standard output, exit code 1 for any non-PASS."""

import json
import subprocess
import sys

import pytest

from xtrax.stages.graph import TemplateGenerator, dump_graph, load_graph


def node(name, ref="jax.numpy:tanh", **metadata):
    return {"id": name, "callable_ref": ref, "metadata": {"nl_description": "Does something.", **metadata}}


def graph_file(folder, nodes, edges=(), version=1):
    path = folder / "graph.json"
    document = {"schema_version": version, "nodes": nodes, "edges": [{"src": a, "dst": b} for a, b in edges]}
    path.write_text(json.dumps(document))
    return path


def inputs(*shape):
    return {"inputs": [{"shape": list(shape), "dtype": "float32"}]}


GOOD = [
    node("a", **inputs(100, 3)),
    node("b", "jax.numpy:sum", axes=[{"name": "n", "cardinality": 100, "default_batch_size": 32}]),
]
BAD = [node("a", **inputs(100, 3)), node("b", "jax.numpy:dot"), node("c", "jax.numpy:sin")]


def test_validate_writes_the_verdicts_back(project):
    path = graph_file(project.folder, GOOD, [("a", "b")])
    code, out, err = project.xtrax("graph-validate", "graph.json")
    assert (code, err) == (0, "")
    envelope = json.loads(out)
    assert envelope["_meta"]["schema_version"] == 1
    assert envelope["_meta"]["verb"] == "graph-validate"
    assert envelope["passed"] is True
    assert envelope["verdicts"] == {"a": "PASS", "b": "PASS"}
    assert envelope["failures"] == []
    assert {n.id: str(n.metadata.audit_verdict) for n in load_graph(path).nodes} == envelope["verdicts"]


@pytest.mark.parametrize("verb", ["graph-validate", "graph-plan"])
def test_a_node_that_does_not_pass_is_exit_code_1(project, verb):
    path = graph_file(project.folder, BAD, [("a", "b"), ("b", "c")])
    code, out, err = project.xtrax(verb, "graph.json")
    assert (code, err) == (1, "")
    envelope = json.loads(out)
    assert envelope["passed"] is False
    assert envelope["verdicts"] == {"a": "PASS", "b": "FAIL", "c": "NEEDS_WORK"}
    assert [(failure["node"], failure["verdict"]) for failure in envelope["failures"]] == [
        ("b", "FAIL"),
        ("c", "NEEDS_WORK"),
    ]
    assert "'b' did not pass" in envelope["failures"][1]["reason"]
    assert {n.id: str(n.metadata.audit_verdict) for n in load_graph(path).nodes} == envelope["verdicts"]


def test_plan_tells_how_the_axes_of_each_node_are_mapped(project):
    graph_file(project.folder, GOOD, [("a", "b")])
    code, out, err = project.xtrax("graph-plan", "graph.json")
    assert (code, err) == (0, "")  # no warning about the remainder either: the reasoning tells it
    envelope = json.loads(out)
    assert envelope["order"] == ["a", "b"]
    assert envelope["plans"]["a"] == []
    (decision,) = envelope["plans"]["b"]
    assert decision["axis"] == "n"
    assert decision["cardinality"] == 100
    assert decision["strategy"] == "SafeMap"
    assert decision["batch_size"] == 32
    assert "100" in decision["reasoning"]


def test_plan_of_a_node_that_does_not_pass_is_null(project):
    axes = [{"name": "n", "cardinality": 100, "default_batch_size": 32, "heterogeneous": True}]
    graph_file(project.folder, [node("a", axes=axes, **inputs(100, 3))])
    code, out, _ = project.xtrax("graph-plan", "graph.json")
    assert code == 1
    assert json.loads(out)["plans"] == {"a": None}


def test_callables_beside_the_graph_are_found(project):
    (project.folder / "sub").mkdir()
    (project.folder / "sub" / f"beside_{project.module}.py").write_text("def double(x): return 2 * x")
    graph_file(project.folder / "sub", [node("a", f"beside_{project.module}:double", **inputs(3))])
    assert project.xtrax("graph-validate", "sub/graph.json")[0] == 0


def test_author_makes_the_graph_of_its_generator(project):
    code, out, err = project.xtrax("graph-author", "--out", "made.json", "--num-nodes", "6", "--seed", "3")
    assert (code, err) == (0, "")
    envelope = json.loads(out)
    made = load_graph(project.folder / "made.json")
    wanted = TemplateGenerator().generate(seed=3, num_nodes=6)
    assert [n.id for n in made.nodes] == [n.id for n in wanted.nodes]
    assert made.edges == wanted.edges
    assert envelope["verdicts"] == {n.id: "PASS" for n in wanted.nodes}
    code, _, err = project.xtrax("graph-author", "--out", "made.json", "--seed", "4")
    assert code == 2
    assert "made.json is there already; name another file, or say --force" in err
    assert load_graph(project.folder / "made.json") == made
    assert project.xtrax("graph-author", "--out", "made.json", "--seed", "4", "--force")[0] == 0
    assert load_graph(project.folder / "made.json") != made


def test_author_with_a_generator_of_ones_own(project):
    project.code.write_text(
        project.code.read_text()
        + """
from xtrax.stages.graph import StageGraph, StageNode

class Unfinished:
    def generate(self, seed, num_nodes):
        return StageGraph([StageNode(f"n{i}", "jax.numpy:sin", {"nl_description": "Sine."}) for i in range(num_nodes)])

class Nothing:
    def generate(self, seed, num_nodes):
        return []

class Breaks:
    def generate(self, seed, num_nodes):
        raise RuntimeError("no model")
"""
    )
    author = ["graph-author", "--out", "own.json", "--num-nodes", "2", "--generator"]
    code, out, _ = project.xtrax(*author, "MODULE:Unfinished")
    assert code == 1  # its sources have no inputs, so they cannot be judged
    assert json.loads(out)["verdicts"] == {"n0": "NEEDS_WORK", "n1": "NEEDS_WORK"}
    for name, message in (("Nothing", "must generate a StageGraph, found list"), ("Breaks", "RuntimeError: no model")):
        code, _, err = project.xtrax(*author, f"MODULE:{name}", "--force")
        assert code == 2
        assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2"),
        ("[]", "a graph is a JSON object; found list"),
        ('{"nodes": [], "edges": []}', "schema_version is missing"),
        ('{"schema_version": 2, "nodes": [], "edges": []}', "a newer xtrax-stages reads it"),
        ('{"schema_version": 1, "nodes": [], "edges": []}', "the graph has no nodes"),
        ('{"schema_version": 1, "nodes": [], "edges": [], "nodes": []}', "the key 'nodes' twice"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_no_graph_is_told_in_a_line(project, text, message):
    path = project.folder / "graph.json"
    path.write_text(text)
    for verb in ("graph-validate", "graph-plan"):
        code, out, err = project.xtrax(verb, "graph.json")
        assert (code, out) == (2, "")
        assert "graph.json" in err
        assert message in err
        assert err.count("\n") == 1
        assert path.read_text() == text


def test_a_missing_file_a_folder_and_a_misspelt_callable(project):
    assert "graph.json: no such file; xtrax graph-author" in project.xtrax("graph-validate", "graph.json")[2]
    assert "is a folder" in project.xtrax("graph-validate", ".")[2]
    graph_file(project.folder, [node("a", "jax.numpy:tahn", **inputs(3))])
    code, _, err = project.xtrax("graph-validate", "graph.json")
    assert code == 2
    assert "node 'a'" in err


def test_a_callable_whose_module_exits_is_told(project):
    (project.folder / f"exits_{project.module}.py").write_text("import sys\n\nsys.exit(0)\n")
    graph_file(project.folder, [node("a", f"exits_{project.module}:f", **inputs(3))])
    for verb in ("graph-validate", "graph-plan"):
        code, out, err = project.xtrax(verb, "graph.json")
        assert (code, out) == (2, "")
        assert "node 'a'" in err
        assert "failed: SystemExit: 0" in err


@pytest.mark.parametrize("verb", ["graph-validate", "graph-plan"])
def test_a_missing_graph_is_told_without_importing_jax(tmp_path, verb):
    program = (
        "import sys\nfrom xtrax.cli import main\n"
        f"code = main([{verb!r}, 'graph.json'])\nprint(code, 'jax' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False"]
    assert "graph.json: no such file" in done.stderr


def test_a_frozen_graph_gets_its_verdicts_too(project):
    graph = TemplateGenerator().generate(seed=0, num_nodes=2)
    document = project.folder / "frozen.json"
    dump_graph(graph, document)
    raw = json.loads(document.read_text())
    for each in raw["nodes"]:
        each["frozen"] = True
    document.write_text(json.dumps(raw))
    assert project.xtrax("graph-validate", "frozen.json")[0] == 0
    assert all(n.metadata.audit_verdict == "PASS" and n.frozen for n in load_graph(document).nodes)
