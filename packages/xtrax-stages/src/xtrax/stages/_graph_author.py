"""Make stage graphs."""

import random
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from xtrax.stages._graph_refs import GraphError
from xtrax.stages._graph_types import StageEdge, StageGraph, StageNode

_UNARY = (
    ("jax.numpy:tanh", "Squashes each element to (-1, 1).", r"\tanh x"),
    ("jax.nn:softplus", "A smooth rectifier of each element.", r"\log(1 + e^x)"),
    ("jax.numpy:sin", "The sine of each element.", r"\sin x"),
    ("jax.numpy:square", "The square of each element.", r"x^2"),
)
_BINARY = (
    ("jax.numpy:add", "The sum of two values.", r"x + y"),
    ("jax.numpy:multiply", "The product of two values, elementwise.", r"x \odot y"),
    ("jax.numpy:maximum", "The larger of two values, elementwise.", r"\max(x, y)"),
)


@runtime_checkable
class Generator(Protocol):
    """Makes a stage graph from a seed.

    Example:
        >>> from xtrax.stages.graph import Generator, TemplateGenerator
        >>> isinstance(TemplateGenerator(), Generator)
        True
    """

    def generate(self, seed: int, num_nodes: int) -> StageGraph:
        """Make a graph of `num_nodes` nodes; the same for the same arguments."""
        ...


class TemplateGenerator:
    """Makes graphs of elementwise JAX functions, the same for the same seed, that pass `validate_graph`.

    The first node is the only source. Each further one applies a function of one or two arguments to the values of
    earlier nodes, all of one shape.

    Args:
        shape: The shape of the source's argument.
        dtype: Its dtype, a floating one.

    Raises:
        GraphError: If the shape or the dtype is not one.
        TypeError: If they are of the wrong kind.

    Example:
        >>> from xtrax.stages.graph import TemplateGenerator, validate_graph
        >>> graph = TemplateGenerator().generate(seed=0, num_nodes=5)
        >>> len(graph.nodes), validate_graph(graph).passed
        (5, True)
    """

    def __init__(self, shape: Sequence[int] = (8, 4), dtype: Any = "float32") -> None:
        """See the class."""
        # The checks of a source node are those of its inputs.
        probe = StageNode("source", _UNARY[0][0], {"nl_description": _UNARY[0][1], "inputs": [(shape, dtype)]})
        self._inputs = probe.metadata.inputs

    def generate(self, seed: int, num_nodes: int) -> StageGraph:
        """Make a graph.

        Args:
            seed: Any integer of at least 0.
            num_nodes: How many nodes, at least 1.

        Raises:
            GraphError: If a number is too small.
            TypeError: If one is not an integer.
        """
        for argument, value, least in (("seed", seed, 0), ("num_nodes", num_nodes, 1)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{argument} must be an integer; found {value!r}")
            if value < least:
                raise GraphError(f"{argument} must be at least {least}; found {value}")
        rng = random.Random(seed)
        nodes: list[StageNode] = []
        edges: list[StageEdge] = []
        for i in range(num_nodes):
            binary = i > 1 and rng.random() < 0.5
            ref, description, label = rng.choice(_BINARY if binary else _UNARY)
            node_id = f"n{i}_{ref.partition(':')[2]}"
            metadata: dict[str, Any] = {"nl_description": description, "mathjax_label": label}
            if i == 0:
                metadata["inputs"] = self._inputs
            edges += [
                StageEdge(nodes[rng.randrange(i)].id, node_id) for _ in range(0 if i == 0 else 2 if binary else 1)
            ]
            nodes.append(StageNode(node_id, ref, metadata))
        return StageGraph(tuple(nodes), tuple(edges))
