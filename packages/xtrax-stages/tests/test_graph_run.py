"""Stage graphs: judged by abstract evaluation, and run."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xtrax.stages import HostTap, PlanTopologyError, io_callback
from xtrax.stages.graph import (
    AuditVerdict,
    BoundaryRefs,
    GraphError,
    StageEdge,
    StageGraph,
    StageNode,
    TemplateGenerator,
    compile_graph,
    dump_graph,
    load_graph,
    validate_graph,
)
from xtrax.tiling import reducers
from xtrax.tiling.plan import AxisSpec


def node(name, ref, **slots):
    return StageNode(name, ref, {"nl_description": f"Does {name}.", **slots})


def edges(*pairs):
    return [StageEdge(*pair) for pair in pairs]


MATRICES = [((3, 4), "float32")]
LEFT = node("left", jnp.tanh, inputs=MATRICES)
RIGHT = node("right", lambda x: x.T, inputs=MATRICES)


def test_predecessors_are_positional_in_the_order_of_the_edges():
    for pairs, shape in ([("left", "right"), (3, 3)], [("right", "left"), (4, 4)]):
        graph = StageGraph([LEFT, RIGHT, node("dot", jnp.matmul)], edges(*((p, "dot") for p in pairs)))
        assert validate_graph(graph).passed
        x, y = np.linspace(-1, 1, 12).reshape(3, 4), np.linspace(0, 2, 12).reshape(3, 4)
        values = {"left": np.tanh(x), "right": y.T}
        got = compile_graph(graph)(jnp.asarray(x), jnp.asarray(y))
        assert got.shape == shape
        np.testing.assert_allclose(got, values[pairs[0]] @ values[pairs[1]], rtol=1e-6)


def test_two_edges_pass_the_value_twice():
    graph = StageGraph(
        [node("x", jnp.sin, inputs=[((3,), "float32")]), node("sq", jnp.multiply)], edges(("x", "sq"), ("x", "sq"))
    )
    assert validate_graph(graph).passed
    x = jnp.arange(3.0)
    np.testing.assert_allclose(compile_graph(graph)(x), np.sin(x) ** 2, rtol=1e-6)


def test_each_node_gets_its_verdict_and_each_failure_its_reason():
    graph = StageGraph(
        [
            LEFT,
            node("wrong shapes", jnp.matmul),
            node("after it", jnp.sum),
            node("no inputs", jnp.tanh),
            node("no module", "no_such_module:f", inputs=MATRICES),
            node("raises", _raises, inputs=MATRICES),
            node("exits", _exits, inputs=MATRICES),
            node("arity", lambda x, y: x),
            node("inputs of its own", jnp.tanh, inputs=MATRICES),
            node("fine", jnp.sum),
        ],
        edges(
            ("left", "wrong shapes"),
            ("left", "wrong shapes"),
            ("wrong shapes", "after it"),
            ("left", "arity"),
            ("left", "inputs of its own"),
            ("left", "fine"),
        ),
    )
    result = validate_graph(graph)
    assert not result.passed
    verdicts = {n.id: n.metadata.audit_verdict for n in result.graph.nodes}
    assert verdicts == {
        "left": "PASS",
        "wrong shapes": "FAIL",
        "after it": "NEEDS_WORK",
        "no inputs": "NEEDS_WORK",
        "no module": "FAIL",
        "raises": "FAIL",
        "exits": "FAIL",
        "arity": "FAIL",
        "inputs of its own": "FAIL",
        "fine": "PASS",
    }
    reasons = {failure.node_id: failure.reason for failure in result.failures}
    assert {failure.node_id: failure.verdict for failure in result.failures} == {
        name: verdict for name, verdict in verdicts.items() if verdict != "PASS"
    }
    assert "matmul" in reasons["wrong shapes"] or "dot_general" in reasons["wrong shapes"]
    assert "'wrong shapes' did not pass" in reasons["after it"]
    assert "`inputs`" in reasons["no inputs"]
    assert "no_such_module" in reasons["no module"]
    assert reasons["raises"] == "LookupError: as it does"
    assert reasons["exits"] == "SystemExit: 0"
    assert "missing 1 required positional argument: 'y'" in reasons["arity"]
    assert "has predecessors" in reasons["inputs of its own"]
    # The graph that was given is as it was.
    assert all(n.metadata.audit_verdict is None for n in graph.nodes)


def _raises(x):
    raise LookupError("as it does")


def _exits(x):
    sys.exit(0)


def test_an_old_verdict_is_overwritten():
    stale = node("x", jnp.tanh, inputs=MATRICES, audit_verdict="FAIL")
    assert validate_graph(StageGraph([stale])).graph.node("x").metadata.audit_verdict is AuditVerdict.PASS


def test_validation_computes_nothing_and_issues_no_callback():
    seen = []

    def record(x):
        io_callback(seen.append, None, x)
        return x @ x.T

    # 4 TB, if it were ever allocated.
    result = validate_graph(StageGraph([node("big", record, inputs=[((10**6, 10**6), "float32")])]))
    jax.effects_barrier()
    assert result.passed
    assert seen == []


AXES = [AxisSpec("batch", 6, 2), {"name": "channel", "cardinality": 4, "default_batch_size": 4}]


def test_a_node_is_mapped_over_its_axes_and_fused_at_their_edges():
    def norm(x):
        return jnp.sqrt(jnp.sum(x * x))

    graph = StageGraph(
        [node("norm", norm, inputs=[((6, 4, 5), "float32")], axes=AXES, boundary={"channel": {"fuse": jnp.max}})]
    )
    assert validate_graph(graph).passed
    x = np.random.default_rng(0).normal(size=(6, 4, 5)).astype(np.float32)
    np.testing.assert_allclose(compile_graph(graph)(jnp.asarray(x)), np.linalg.norm(x, axis=2).max(axis=1), rtol=1e-6)


class OrderedTap:
    ordered = True

    def __init__(self):
        self.seen = []

    def __call__(self, value):
        io_callback(lambda v: self.seen.append(float(v)), None, value, ordered=True)
        return value


def test_a_node_s_tap_fires_when_the_graph_runs():
    tap = OrderedTap()
    graph = StageGraph(
        [node("sum", jnp.sum, inputs=[((6, 2), "float32")], axes=AXES[:1], boundary={"batch": {"tap": tap}})]
    )
    assert validate_graph(graph).passed
    assert tap.seen == []
    got = jax.jit(compile_graph(graph))(jnp.arange(12.0).reshape(6, 2))
    jax.effects_barrier()
    assert got.tolist() == tap.seen == [1.0, 5.0, 9.0, 13.0, 17.0, 21.0]


def test_a_node_s_host_tap_is_told_where_each_element_lies():
    seen = []
    tap = HostTap(
        lambda values, index: seen.extend(zip(map(tuple, index.tolist()), values.tolist(), strict=False)), ordered=True
    )
    graph = StageGraph(
        [node("sum", jnp.sum, inputs=[((6, 4, 2), "float32")], axes=AXES, boundary={"channel": {"tap": tap}})]
    )
    assert validate_graph(graph).passed
    assert seen == []
    x = np.arange(48.0, dtype=np.float32).reshape(6, 4, 2)
    np.testing.assert_array_equal(compile_graph(graph)(jnp.asarray(x)), x.sum(axis=2))
    assert seen == [((i, j), float(x[i, j].sum())) for i in range(6) for j in range(4)]


def test_a_streamed_fuse_by_reference_survives_the_file(tmp_path):
    axes = [{"name": "batch", "cardinality": 6, "default_batch_size": 2}]
    boundary = {"batch": {"fuse": "xtrax.tiling.reducers:mean"}}
    graph = StageGraph([node("square", "jax.numpy:square", inputs=[((6, 3), "float32")], axes=axes, boundary=boundary)])
    dump_graph(graph, tmp_path / "graph.json")
    loaded = load_graph(tmp_path / "graph.json")
    assert loaded == graph
    assert validate_graph(loaded).passed
    x = np.arange(18.0, dtype=np.float32).reshape(6, 3)
    np.testing.assert_allclose(compile_graph(loaded)(jnp.asarray(x)), (x**2).mean(axis=0), rtol=1e-6)
    assert BoundaryRefs(fuse=reducers.mean).fuse is reducers.mean
    with pytest.raises(TypeError, match="boundary tap must be a callable"):
        BoundaryRefs(tap=reducers.mean)


@pytest.mark.parametrize(
    ("slots", "reason"),
    [
        ({"boundary": {"channel": {"tap": OrderedTap()}}}, "axis 'channel': its tap is ordered"),
        ({"boundary": {"chanel": {"fuse": jnp.sum}}}, r"Did you mean 'channel'\?"),
        ({"axes": AXES + AXES[:1]}, "batch"),
        ({"axes": [AxisSpec("batch", 7, 2)]}, "dimension 0 is axis 'batch' of size 7; found 6"),
        ({"axes": [*AXES, AxisSpec("feature", 5, 5), AxisSpec("more", 2, 2)]}, "axis 'more'.*no such dimension"),
        (
            {"axes": [{"name": "batch", "cardinality": 6, "default_batch_size": 6, "bucket_boundaries": [2, 4]}]},
            "cannot run Bucket",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_axes_that_cannot_run_fail_their_node(slots, reason):
    graph = StageGraph([node("x", jnp.sum, inputs=[((6, 4, 5), "float32")], **{"axes": AXES, **slots})])
    result = validate_graph(graph)
    (failure,) = result.failures
    assert failure.verdict == "FAIL"
    assert re.search(reason, failure.reason)


def test_several_last_nodes_yield_a_dict_and_several_sources_take_their_arguments_in_order():
    graph = StageGraph(
        [
            node("double", lambda x: 2 * x, inputs=[((), "float32")]),
            node("difference", jnp.subtract, inputs=[((), "float32"), ((), "float32")]),
            node("negative", jnp.negative),
        ],
        edges(("double", "negative")),
    )
    run = compile_graph(graph)
    got = jax.jit(run)(1.0, 10.0, 3.0)
    assert {name: float(value) for name, value in got.items()} == {"difference": 7.0, "negative": -2.0}
    with pytest.raises(TypeError, match=r"takes 3 arguments .1 for 'double', 2 for 'difference'.; found 2"):
        run(1.0, 2.0)


def test_a_compiled_graph_is_differentiated_and_mapped():
    graph = StageGraph(
        [node("square", jnp.square, inputs=[((3,), "float32")]), node("total", jnp.sum)], edges(("square", "total"))
    )
    run = compile_graph(graph)
    np.testing.assert_allclose(jax.grad(run)(jnp.arange(3.0)), [0.0, 2.0, 4.0])
    np.testing.assert_allclose(jax.vmap(run)(jnp.arange(6.0).reshape(2, 3)), [5.0, 50.0])


@pytest.mark.parametrize("seed", range(4))
def test_template_graphs_pass_and_run(seed):
    graph = TemplateGenerator(shape=(3,)).generate(seed, 8)
    result = validate_graph(graph)
    assert result.passed
    assert result.failures == ()
    assert {n.metadata.audit_verdict for n in result.graph.nodes} == {"PASS"}
    x = jnp.asarray([-0.5, 0.1, 0.9])
    # The same graph, walked by hand.
    values = {}
    for each in graph.nodes:
        module, _, symbol = each.callable_ref.partition(":")
        fn = getattr(jax.nn if module == "jax.nn" else jnp, symbol)
        arguments = [values[p] for p in graph.predecessors(each.id)] or [x]
        values[each.id] = fn(*arguments)
    got = compile_graph(graph)(x)
    got = got if isinstance(got, dict) else {graph.nodes[-1].id: got}
    for name, value in got.items():
        np.testing.assert_array_equal(value, values[name])


def test_what_cannot_be_compiled_is_refused():
    with pytest.raises(GraphError, match="node 'x': a source node needs `inputs`"):
        compile_graph(StageGraph([node("x", jnp.tanh)]))
    with pytest.raises(GraphError, match="no_such_module"):
        compile_graph(StageGraph([node("x", "no_such_module:f", inputs=MATRICES)]))
    with pytest.raises(PlanTopologyError, match="axis 'channel'"):
        compile_graph(
            StageGraph([node("x", jnp.sum, inputs=MATRICES, axes=AXES, boundary={"channel": {"tap": OrderedTap()}})])
        )
    for use in (compile_graph, validate_graph):
        with pytest.raises(GraphError, match="the graph has no nodes"):
            use(StageGraph([]))
        with pytest.raises(TypeError, match="graph must be a StageGraph; found dict"):
            use({})
