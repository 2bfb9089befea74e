"""Stage graphs: construction, files, references."""

import functools
import json
import os

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.stages.graph import (
    AuditVerdict,
    BoundaryRefs,
    FrozenNodeError,
    Generator,
    GraphError,
    NodeMetadata,
    StageEdge,
    StageGraph,
    StageNode,
    TemplateGenerator,
    dump_graph,
    load_graph,
)
from xtrax.tiling.plan import AxisSpec
from xtrax.tiling.roles import AxisRole


def node(name, ref="jax.numpy:tanh", *, frozen=False, **slots):
    return StageNode(name, ref, {"nl_description": f"Does {name}.", **slots}, frozen)


def graph(*pairs, **slots):
    names = dict.fromkeys(name for pair in pairs for name in pair)
    return StageGraph([node(name, **slots) for name in names], [StageEdge(*pair) for pair in pairs])


FULL = StageGraph(
    [
        StageNode(
            "embed",
            "jax.numpy:tanh",
            NodeMetadata(
                nl_description="Squashes — every element.",
                mathjax_label=r"\tanh x",
                citations=("doi:10/1", "doi:10/2"),
                script_usage="embed(x)",
                audit_verdict=AuditVerdict.NEEDS_WORK,
                inputs=(jax.ShapeDtypeStruct((8, 4), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.bool_)),
                axes=(AxisSpec("batch", 8, 4), AxisSpec("tokens", 4, 4, heterogeneous=True, bucket_boundaries=(2, 4))),
                boundary={"batch": BoundaryRefs(fuse="jax.numpy:mean"), "tokens": BoundaryRefs()},
            ),
            frozen=True,
        ),
        node("add", "jax.numpy:add"),
    ],
    [StageEdge("embed", "add"), StageEdge("embed", "add")],
)


# Construction


def test_the_order_follows_the_edges_and_then_the_nodes():
    diamond = StageGraph(
        [node("d"), node("c"), node("b"), node("a"), node("lonely")],
        [StageEdge("a", "b"), StageEdge("a", "c"), StageEdge("c", "d"), StageEdge("b", "d")],
    )
    assert diamond.order() == ("a", "lonely", "c", "b", "d")
    assert diamond.predecessors("d") == ("c", "b")  # the order of the edges, not of the nodes


@settings(max_examples=50, deadline=None)
@given(
    st.permutations(range(6)), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(lambda p: p[0] < p[1]))
)
def test_every_acyclic_graph_is_ordered(names, pairs):
    # Edges go from a smaller to a larger rank, so there is no cycle; the nodes come in any order.
    made = StageGraph([node(str(i)) for i in names], [StageEdge(str(a), str(b)) for a, b in pairs])
    order = made.order()
    assert sorted(order) == [str(i) for i in range(6)]
    assert all(order.index(str(a)) < order.index(str(b)) for a, b in pairs)


@pytest.mark.parametrize(
    ("pairs", "shown"),
    [
        ([("a", "a")], "'a' -> 'a'"),
        ([("a", "b"), ("b", "a")], "'b'"),
        ([("s", "a"), ("a", "b"), ("b", "c"), ("c", "a")], "'c'"),
    ],
)
def test_a_cycle_is_refused_and_shown(pairs, shown):
    with pytest.raises(GraphError, match="the edges close a cycle: .*" + shown):
        graph(*pairs)


def test_ids_are_unique_and_known():
    with pytest.raises(GraphError, match="node 'a' is given twice"):
        StageGraph([node("a"), node("a")])
    with pytest.raises(
        GraphError, match=r"edge 'encode' -> 'decoed': there is no node 'decoed'.*Did you mean 'decode'\?"
    ):
        StageGraph([node("encode"), node("decode")], [StageEdge("encode", "decoed")])
    with pytest.raises(GraphError, match="there is no node 'c'; there are 'a', 'b'"):
        graph(("a", "b")).node("c")


def test_a_frozen_node_refuses_change():
    made = StageGraph([node("a", frozen=True), node("b")])
    with pytest.raises(FrozenNodeError, match="node 'a' is frozen"):
        made.replace_node(node("a", "jax.numpy:sin"))
    changed = made.replace_node(node("b", "jax.numpy:sin"))
    assert changed.node("b").callable_ref == "jax.numpy:sin"
    assert made.node("b").callable_ref == "jax.numpy:tanh"
    with pytest.raises(AttributeError):
        made.node("a").callable_ref = "jax.numpy:sin"  # ty: ignore[invalid-assignment]
    with pytest.raises(GraphError, match="there is no node 'c'"):
        made.replace_node(node("c"))


def test_a_verdict_is_written_into_a_frozen_node_too():
    judged = StageGraph([node("a", frozen=True), node("b")]).with_verdicts({"a": AuditVerdict.PASS})
    assert judged.node("a").metadata.audit_verdict == "PASS"
    assert judged.node("b").metadata.audit_verdict is None


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: node(""), GraphError, "id must not be empty"),
        (lambda: node(3), TypeError, "id must be a string; found 3"),
        (lambda: node("a", frozen=1), TypeError, "node 'a': frozen must be a bool; found 1"),
        (lambda: node("a", 3), TypeError, "node 'a': callable_ref must be a callable or 'module.path:symbol'; found 3"),
        (lambda: node("a", "jax.numpy.tanh"), GraphError, "node 'a': callable_ref must have the form"),
        (lambda: node("a", "../evil:f"), GraphError, "must have the form"),
        (lambda: node("a", "a:b:c"), GraphError, "must have the form"),
        (lambda: node("a", "m:<lambda>"), GraphError, "node 'a'.* lambda"),
        (lambda: node("a", "m:f.<locals>.g"), GraphError, "node 'a'.* closure"),
        (lambda: StageNode("a", "m:f", {}), GraphError, "node 'a': metadata must say nl_description"),
        (lambda: StageNode("a", "m:f", None), TypeError, "node 'a': metadata must be a NodeMetadata or a mapping"),
        (lambda: StageNode("a", "m:f", {"nl_description": " "}), GraphError, "node 'a': nl_description must say"),
        (lambda: StageNode("a", "m:f", {"nl_description": 3}), TypeError, "node 'a': nl_description must be a string"),
        (lambda: node("a", nl_descripton="x"), GraphError, "no field 'nl_descripton'.*Did you mean 'nl_description'"),
        (lambda: node("a", mathjax_label=3), TypeError, "mathjax_label must be a string or None"),
        (lambda: node("a", citations="doi"), TypeError, "citations must be a sequence"),
        (lambda: node("a", citations=[3]), TypeError, "citations must be strings"),
        (lambda: node("a", audit_verdict="GOOD"), GraphError, "one of PASS, FAIL, NEEDS_WORK or None; found 'GOOD'"),
        (lambda: node("a", inputs=(3, 4)), TypeError, r"inputs\[0\] must be a jax.ShapeDtypeStruct or a pair"),
        (
            lambda: node("a", inputs=[((3, -1), "float32")]),
            GraphError,
            r"inputs\[0\].shape must hold sizes of at least 0",
        ),
        (
            lambda: node("a", inputs=[((True,), "float32")]),
            TypeError,
            r"inputs\[0\].shape must hold integers; found True",
        ),
        (lambda: node("a", inputs=[((1.5,), "float32")]), TypeError, "integers; found 1.5"),
        (lambda: node("a", inputs=[((3,), "floaty")]), GraphError, r"inputs\[0\].dtype.*'floaty'"),
        (lambda: node("a", axes=[{"name": "b"}]), GraphError, r"axes\[0\] must say cardinality, default_batch_size"),
        (lambda: node("a", axes=[{"nam": "b"}]), GraphError, r"axes\[0\] has no field 'nam'.*'name'"),
        (lambda: node("a", axes=[AxisSpec("b", 3, 3), 4]), TypeError, r"axes\[1\] must be a AxisSpec or a mapping"),
        (
            lambda: node("a", axes=[{"name": "b", "cardinality": -1, "default_batch_size": 1}]),
            ValueError,
            "node 'a': .*cardinality",
        ),
        (lambda: node("a", axes=[AxisSpec("b", 3, 3, role=AxisRole.UNKNOWN)]), GraphError, "role KNOWN; found UNKNOWN"),
        (lambda: node("a", boundary=[]), TypeError, "boundary must map axis names"),
        (lambda: node("a", boundary={"b": {"fues": "m:f"}}), GraphError, "Did you mean 'fuse'"),
        (lambda: node("a", boundary={"b": {"fuse": "mean"}}), GraphError, "boundary fuse must have the form"),
        (lambda: StageEdge("a", 3), TypeError, "an edge's dst must be a node's id; found 3"),
        (lambda: StageGraph(node("a")), TypeError, "nodes must be a sequence"),
        (lambda: StageGraph([{"id": "a"}]), TypeError, r"nodes\[0\] must be a StageNode; found dict"),
        (lambda: StageGraph([node("a")], [("a", "a")]), TypeError, r"edges\[0\] must be a StageEdge; found tuple"),
    ],
)
def test_bad_construction_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Files


def test_a_graph_is_read_back_as_it_was_written(tmp_path):
    dump_graph(FULL, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == FULL
    document = json.loads((tmp_path / "graph.json").read_text(encoding="utf-8"))
    assert document["schema_version"] == 1
    assert document["nodes"][0]["metadata"]["inputs"][0] == {"shape": [8, 4], "dtype": "bfloat16"}
    assert document["nodes"][1] == {
        "id": "add",
        "callable_ref": "jax.numpy:add",
        "metadata": {"nl_description": "Does add."},
        "frozen": False,
    }
    assert os.listdir(tmp_path) == ["graph.json"]


def test_a_callable_is_written_as_its_reference(tmp_path):
    dump_graph(StageGraph([node("a", json.dumps)]), tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json").node("a").callable_ref == "json:dumps"


def _closure():
    def inner(x):
        return x

    return inner


def module_level(x):
    return x


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        (lambda x: x, "node 'a': .*<lambda> is a lambda or a closure"),
        (_closure(), "node 'a': .*inner is a lambda or a closure"),
        (functools.partial(jnp.sum, axis=0), "node 'a': a partial object has no name"),
    ],
)
def test_what_cannot_be_imported_is_not_written(tmp_path, ref, message):
    path = tmp_path / "graph.json"
    path.write_text("kept")
    with pytest.raises(GraphError, match=message):
        dump_graph(StageGraph([node("a", ref)]), path)
    with pytest.raises(GraphError, match=message.replace("node 'a'", "node 'a': boundary of axis 'b': fuse")):
        dump_graph(StageGraph([node("a", boundary={"b": {"fuse": ref}})]), path)
    assert path.read_text() == "kept"


def test_a_name_that_means_something_else_by_now_is_not_written(tmp_path, monkeypatch):
    (tmp_path / "twice_named.py").write_text("def f(x): return x\ng = f\ndef f(x): return -x\n")
    monkeypatch.syspath_prepend(tmp_path)
    import twice_named  # ty: ignore[unresolved-import]

    with pytest.raises(GraphError, match="node 'a': 'twice_named:f' names another object"):
        dump_graph(StageGraph([node("a", twice_named.g)]), tmp_path / "graph.json")


def test_a_function_of_the_running_script_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(module_level, "__module__", "__main__")
    with pytest.raises(GraphError, match="defined in the script that runs"):
        dump_graph(StageGraph([node("a", module_level)]), tmp_path / "graph.json")


def test_only_a_graph_is_written_and_only_where_one_can_write(tmp_path):
    with pytest.raises(TypeError, match="graph must be a StageGraph; found dict"):
        dump_graph({}, tmp_path / "graph.json")
    with pytest.raises(FileNotFoundError):
        dump_graph(FULL, tmp_path / "missing" / "graph.json")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        dump_graph(FULL, tmp_path / "folder")
    assert sorted(os.listdir(tmp_path)) == ["folder"]
    with pytest.raises(FileNotFoundError):
        load_graph(tmp_path / "graph.json")


def _document():
    return {
        "schema_version": 1,
        "nodes": [{"id": "a", "callable_ref": "jax.numpy:tanh", "metadata": {"nl_description": "Squashes."}}],
        "edges": [],
    }


def _changed(path, value):
    document = _document()
    *parents, last = path
    target = document
    for key in parents:
        target = target[key]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return document


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (_changed(["schema_version"], None), "schema_version is missing; this xtrax reads version 1"),
        (_changed(["schema_version"], 0), "schema_version is 0; this xtrax reads version 1: write the graph anew"),
        (_changed(["schema_version"], 2), "schema_version is 2.*a newer xtrax-stages reads it"),
        (_changed(["schema_version"], "1"), "schema_version must be an integer; found '1'"),
        (_changed(["schema_version"], True), "schema_version must be an integer; found True"),
        ([], "a graph is a JSON object; found list"),
        (_changed(["nodes"], None), "must have nodes, edges; missing: nodes"),
        (_changed(["extra"], 1), "unknown: 'extra'"),
        (_changed(["nodes"], {}), "nodes must be a list; found dict"),
        (_changed(["nodes", 0], "a"), r"nodes\[0\] must be an object"),
        (_changed(["nodes", 0, "id"], None), r"nodes\[0\] must have .*missing: id"),
        (_changed(["nodes", 0, "frozen"], "no"), "node 'a': frozen must be a bool"),
        (_changed(["nodes", 0, "colour"], "red"), r"nodes\[0\] must have.*unknown: 'colour'"),
        (_changed(["nodes", 0, "metadata"], []), "node 'a': metadata must be an object"),
        (_changed(["nodes", 0, "metadata", "nl_description"], None), "node 'a': metadata must say nl_description"),
        (_changed(["nodes", 0, "metadata", "inputs"], [[3]]), r"node 'a': inputs\[0\] must be an object"),
        (_changed(["nodes", 0, "metadata", "inputs"], 3), "node 'a': inputs must be a list"),
        (_changed(["nodes", 0, "metadata", "axes"], [{"name": "b"}]), r"node 'a': axes\[0\] must say cardinality"),
        (_changed(["edges"], [{"src": "a"}]), r"edges\[0\] must have src, dst; missing: dst"),
        (_changed(["edges"], [{"src": "a", "dst": "b"}]), "there is no node 'b'"),
        (_changed(["edges"], [{"src": "a", "dst": "a"}]), "cycle"),
        (_changed(["nodes", 0, "callable_ref"], 3), r"nodes\[0\]: callable_ref must be 'module:symbol'"),
        (
            _changed(["nodes", 0, "callable_ref"], "no_such_module.x:f"),
            "node 'a': .*there is no module 'no_such_module'",
        ),
        (_changed(["nodes", 0, "callable_ref"], "jax.no_such:f"), "node 'a': .*there is no module 'jax.no_such'"),
        (
            _changed(["nodes", 0, "callable_ref"], "jax.numpy:tanhh"),
            r"node 'a': .*has no 'tanhh'. Did you mean 'tanh'\?",
        ),
        (
            _changed(["nodes", 0, "callable_ref"], "jax.numpy:pi"),
            "node 'a': 'jax.numpy:pi' is not callable; found float",
        ),
        (_changed(["nodes", 0, "callable_ref"], "m:<lambda>"), "node 'a'.*lambda or a closure"),
        (
            _changed(["nodes", 0, "metadata", "boundary"], {"b": {"tap": "json:nothing"}}),
            "node 'a': boundary of axis 'b': tap: 'json:nothing': 'json' has no 'nothing'",
        ),
    ],
)
def test_a_file_that_is_no_graph_is_refused(tmp_path, document, message):
    path = tmp_path / "graph.json"
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match=message) as caught:
        load_graph(path)
    assert str(path) in str(caught.value)


def test_the_unchanged_document_is_a_graph(tmp_path):
    (tmp_path / "graph.json").write_text(json.dumps(_document()))
    assert load_graph(tmp_path / "graph.json") == StageGraph(
        [StageNode("a", "jax.numpy:tanh", {"nl_description": "Squashes."})]
    )


@pytest.mark.parametrize("depth", [400, 100_000])
@pytest.mark.parametrize("where", ["{}", '{{"schema_version": 1, "nodes": {}, "edges": []}}'])
def test_a_file_that_nests_without_end_is_refused(tmp_path, where, depth):
    path = tmp_path / "graph.json"
    path.write_text(where.format("[" * depth + "]" * depth))
    with pytest.raises(GraphError, match=r"graph\.json: .*(nested too deeply|must be an object|is a JSON object)"):
        load_graph(path)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('{"schema_version": 1, "nodes": [], "edges": [], "nodes": []}', "nodes"),
        ('{"schema_version": 1, "nodes": [{"id": "a", "id": "b"}], "edges": []}', "id"),
        ('{"schema_version": 1, "nodes": [], "edges": [{"src": "a", "dst": "b", "dst": "b"}]}', "dst"),
    ],
)
def test_a_key_that_is_there_twice_is_refused(tmp_path, text, key):
    path = tmp_path / "graph.json"
    path.write_text(text)
    with pytest.raises(GraphError, match=f"graph.json: an object has the key '{key}' twice"):
        load_graph(path)


def test_a_number_of_too_many_digits_is_refused(tmp_path):
    (tmp_path / "graph.json").write_text('{"schema_version": ' + "1" * 5000 + "}")
    with pytest.raises(GraphError, match=r"graph\.json: .*digits"):
        load_graph(tmp_path / "graph.json")


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.95])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tmp_path / "graph.json"
    dump_graph(FULL, path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    with pytest.raises(GraphError, match=r"graph\.json"):
        load_graph(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(GraphError, match="not UTF-8"):
        load_graph(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_dependency\n", "importing 'faulty' failed: No module named 'no_such_dependency'"),
        ("raise OSError('no licence')\n", "importing 'faulty' failed: OSError: no licence"),
        ("def f(:\n", "importing 'faulty' failed: SyntaxError"),
        ("import sys\nsys.exit(0)\n", "node 'a': 'faulty:f': importing 'faulty' failed: SystemExit: 0"),
    ],
)
def test_a_module_that_fails_on_import_is_told_from_a_missing_one(tmp_path, monkeypatch, source, message):
    (tmp_path / "faulty.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "graph.json").write_text(json.dumps(_changed(["nodes", 0, "callable_ref"], "faulty:f")))
    with pytest.raises(GraphError, match=message):
        load_graph(tmp_path / "graph.json")


# Authoring


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**40), num_nodes=st.integers(1, 30))
def test_a_template_graph_has_its_number_of_nodes_and_one_source(seed, num_nodes):
    made = TemplateGenerator().generate(seed, num_nodes)
    assert len(made.nodes) == num_nodes
    assert [n.id for n in made.nodes if not made.predecessors(n.id)] == [made.nodes[0].id]
    assert made == TemplateGenerator().generate(seed, num_nodes)


def test_template_graphs_differ_between_seeds():
    made = {tuple(n.id for n in TemplateGenerator().generate(seed, 12).nodes) for seed in range(20)}
    assert len(made) == 20


def test_template_graphs_survive_their_file(tmp_path):
    made = TemplateGenerator(shape=(2, 3), dtype="bfloat16").generate(seed=7, num_nodes=9)
    dump_graph(made, tmp_path / "graph.json")
    assert load_graph(tmp_path / "graph.json") == made


def test_anything_that_generates_is_a_generator():
    class Constant:
        def generate(self, seed, num_nodes):
            return FULL

    assert isinstance(Constant(), Generator)
    assert not isinstance(object(), Generator)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TemplateGenerator().generate(0, 0), GraphError, "num_nodes must be at least 1; found 0"),
        (lambda: TemplateGenerator().generate(-1, 1), GraphError, "seed must be at least 0; found -1"),
        (lambda: TemplateGenerator().generate(True, 1), TypeError, "seed must be an integer; found True"),
        (lambda: TemplateGenerator().generate(0, 2.0), TypeError, "num_nodes must be an integer; found 2.0"),
        (lambda: TemplateGenerator(shape=(-1,)), GraphError, "sizes of at least 0"),
        (lambda: TemplateGenerator(dtype="floaty"), GraphError, "'floaty'"),
    ],
)
def test_bad_authoring_is_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()
