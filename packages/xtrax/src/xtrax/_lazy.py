"""Where each public name lies, and how it is found on first use (PEP 562).

`difflib` and `importlib.metadata` are imported where they are used: they would double the time of `import xtrax`.
"""

import importlib

DISTRIBUTIONS = {
    "jit": "xtrax-jit",
    "tiling": "xtrax-tiling",
    "inference": "xtrax-tiling",
    "stages": "xtrax-stages",
    "run": "xtrax-run",
    "config": "xtrax-run",
    "training": "xtrax-train",
    "sparse": "xtrax-sparse",
    "eda": "xtrax-eda",
    "cli": "xtrax-cli",
}
"""The distribution that ships each layer."""

_NAMES_BY_LAYER = {
    "jit": "batched_jit bounded_jit",
    "tiling": (
        "AxisDecision AxisSpec BatchPlan BatchPlanner Bucket CarrySpec DedupGather DedupSpec MemoryBudget SafeMap Scan "
        "Vmap bucketize find_duplicates make_axis_dispatch map_ragged select_bucket tiled_apply tiled_hessian "
        "tiled_jacfwd tiled_jacrev tiled_vmap"
    ),
    "inference": "AxisOverride axis_config infer_bundle",
    "stages": "AxisBoundary Fuse HostSink HostTap Sink StageBundle Tap execute_plan",
    "run": "RunSpec SinkSpec make_sink open_results run_tiled",
    "training": (
        "Callback DataModule Engine ResumableState SafetyTrainStep Trainer adamw_with_schedule init_state "
        "load_checkpoint make_optimizer save_checkpoint"
    ),
    "sparse": "SparseConfig SparsePolicy make_sparse_forward_fn prune_structured sparsify_model",
    "eda": "explain_plan render",
}
LAYER_BY_NAME = {name: layer for layer, names in _NAMES_BY_LAYER.items() for name in names.split()}
NAMES = sorted([*LAYER_BY_NAME, *DISTRIBUTIONS, "versions"])


def versions() -> dict[str, str | None]:
    """The installed version of every xtrax distribution, of jax and of jaxlib.

    Returns:
        Distribution name to version, `None` where it is not installed. Nothing is imported to find out.

    >>> sorted(versions())[:3]
    ['jax', 'jaxlib', 'xtrax']
    """
    from importlib import metadata

    found: dict[str, str | None] = {}
    for distribution in ("xtrax", *dict.fromkeys(DISTRIBUTIONS.values()), "jax", "jaxlib"):
        try:
            found[distribution] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[distribution] = None
    return found


def resolve(name: str) -> object:
    """The layer, class or function that `xtrax.<name>` stands for.

    Raises:
        AttributeError: There is no such name; the nearest one is suggested.
        ImportError: The layer is missing, or too old to have the name; says which distribution to install.
    """
    if name == "versions":
        return versions
    if name in DISTRIBUTIONS:
        return _import_layer(name)
    if name not in LAYER_BY_NAME:
        import difflib

        close = difflib.get_close_matches(name, NAMES, n=1)
        hint = f"; did you mean 'xtrax.{close[0]}'?" if close else "; dir(xtrax) lists what there is"
        raise AttributeError(f"module 'xtrax' has no attribute {name!r}{hint}", name=name)
    layer = LAYER_BY_NAME[name]
    module = _import_layer(layer)
    if not hasattr(module, name):
        raise ImportError(f"xtrax.{name} is not in xtrax.{layer}: {_advice(layer)}", name=f"xtrax.{layer}")
    return getattr(module, name)


def _import_layer(layer: str):
    try:
        return importlib.import_module(f"xtrax.{layer}")
    except ImportError as error:
        # Only a fault of the xtrax layers themselves is translated; a missing third party speaks for itself.
        parts = (error.name or "").split(".")
        if len(parts) < 2 or parts[0] != "xtrax" or parts[1] not in DISTRIBUTIONS:
            raise
        raise ImportError(f"xtrax.{layer} cannot be imported: {_advice(parts[1])}", name=error.name) from error


def _advice(layer: str) -> str:
    """Which distribution to install, and what is there now."""
    from importlib import metadata

    distribution = DISTRIBUTIONS[layer]
    found = versions()[distribution]
    state = f"{distribution} {found} is too old for the other layers" if found else f"{distribution} is not installed"
    needed = next((r for r in metadata.requires("xtrax") or () if r.startswith(distribution)), distribution)
    return f"{state}; install the wheel of {needed}"
