"""The graph verbs: a pipeline as JSON, judged, planned or made, and told as one JSON object."""

import contextlib
import json
import warnings
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from xtrax.cli._errors import CLIError, tell
from xtrax.cli._imports import add_import_paths, load_fn
from xtrax.cli._version import __version__
from xtrax.cli._write import write
from xtrax.stages.graph import (
    GraphError,
    GraphValidationResult,
    StageGraph,
    TemplateGenerator,
    dump_graph,
    load_graph,
    validate_graph,
)
from xtrax.tiling import BatchPlanner, RemainderWarning

ENVELOPE_VERSION = 1


def graph_validate(path: Path) -> int:
    """Judge each node of a graph, write the verdicts into the file, and print the envelope.

    Args:
        path: The JSON file of the graph.

    Returns:
        The exit code: 0 if every node passed, else 1.

    Raises:
        CLIError: If the file cannot be read or written, or is not a graph.
    """
    result = _judge(path)
    _save(result.graph, path)
    return _envelope("graph-validate", path, result)


def graph_plan(path: Path) -> int:
    """As `graph_validate`, with how the axes of each node would be mapped.

    Args:
        path: The JSON file of the graph.

    Returns:
        The exit code: 0 if every node passed, else 1.

    Raises:
        CLIError: If the file cannot be read or written, or is not a graph.
    """
    result = _judge(path)
    passed = {node.id for node in result.graph.nodes} - {failure.node_id for failure in result.failures}
    plans = {node.id: _plan(node.metadata.axes) if node.id in passed else None for node in result.graph.nodes}
    _save(result.graph, path)
    return _envelope("graph-plan", path, result, order=list(result.graph.order()), plans=plans)


def graph_author(out: Path, generator: str | None, seed: int, num_nodes: int, force: bool) -> int:
    """Make a graph, judge it, write it and print the envelope.

    Args:
        out: The JSON file to write.
        generator: `module:symbol` of a class or function that returns an object with `generate(seed, num_nodes)`;
            elementwise JAX functions if None.
        seed: What it is called with, at least 0.
        num_nodes: What it is called with, at least 1.
        force: Whether a file that is there may be replaced.

    Returns:
        The exit code: 0 if every node passed, else 1.

    Raises:
        CLIError: If the generator fails or gives no graph, or the file is there or cannot be written.
    """
    if out.exists() and not force:
        raise CLIError(f"{out} is there already; name another file, or say --force to replace it")
    name = generator or "xtrax.stages.graph:TemplateGenerator"
    make = TemplateGenerator if generator is None else load_fn(generator)
    try:
        graph = make().generate(seed=seed, num_nodes=num_nodes)
    except (Exception, SystemExit) as error:
        raise CLIError(f"{name} failed: {tell(error)}") from error
    if not isinstance(graph, StageGraph):
        raise CLIError(f"{name} must generate a StageGraph, found {type(graph).__name__}")
    result = _validated(graph, name)
    _save(result.graph, out)
    return _envelope("graph-author", out, result, generator=name, seed=seed, num_nodes=len(graph.nodes))


def _judge(path: Path) -> GraphValidationResult:
    add_import_paths([path.resolve().parent, Path.cwd()])
    try:
        graph = load_graph(path)
    except OSError as error:
        raise CLIError(f"{path}: cannot be read: {error.strerror}") from error
    except GraphError as error:
        raise CLIError(str(error)) from error
    return _validated(graph, str(path))


def _validated(graph: StageGraph, where: str) -> GraphValidationResult:
    try:
        with _remainders_untold():
            return validate_graph(graph)
    except GraphError as error:
        raise CLIError(f"{where}: {error}") from error


def _plan(axes: Sequence[Any]) -> list[dict[str, Any]]:
    """The decisions for the axes of a node, the outermost first."""
    with _remainders_untold():
        decisions = BatchPlanner().plan(axes).decisions if axes else ()
    return [
        {
            "axis": decision.spec.name,
            "cardinality": decision.spec.cardinality,
            "strategy": type(decision.strategy).__name__,
            "batch_size": decision.batch_size,
            "reasoning": decision.reasoning,
        }
        for decision in decisions
    ]


@contextlib.contextmanager
def _remainders_untold() -> Generator[None]:
    """Without warnings about chunks that do not divide an axis: the reasoning says so."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RemainderWarning)
        yield


def _save(graph: StageGraph, path: Path) -> None:
    try:
        dump_graph(graph, path)
    except OSError as error:
        raise CLIError(f"cannot write {path}: {error.strerror}; the verdicts belong into it") from error
    except GraphError as error:
        raise CLIError(str(error)) from error


def _envelope(verb: str, path: Path, result: GraphValidationResult, **more: Any) -> int:
    """Print the result as one JSON object; the exit code that it stands for."""
    verdicts: Mapping[str, Any] = {node.id: str(node.metadata.audit_verdict) for node in result.graph.nodes}
    failures = [
        {"node": failure.node_id, "verdict": str(failure.verdict), "reason": failure.reason}
        for failure in result.failures
    ]
    envelope = {
        "_meta": {"schema_version": ENVELOPE_VERSION, "verb": verb, "xtrax": __version__},
        "path": str(path),
        "passed": result.passed,
        "verdicts": verdicts,
        "failures": failures,
        **more,
    }
    write(json.dumps(envelope, indent=2, ensure_ascii=False), None)
    return 0 if result.passed else 1
