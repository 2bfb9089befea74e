"""Print every public name of the contract: where it lies, whether it is there, and what it is.

A name may be absent only if the contract marks it as going beyond what comparable libraries have (`+`).

Usage:
    python tools/surface.py            the whole table
    python tools/surface.py --absent   only what is missing
"""

import argparse
import importlib
import inspect
import sys

# module -> names. A name after `+` is one that the contract marks; `Class.member` is looked up on the class.
SURFACE = {
    "xtrax.jit": (
        "bounded_jit batched_jit + TraceBudgetExceededError explain_retrace TraceSignature filter_bounded_jit"
    ),
    "xtrax.tiling": (
        "AxisSpec AxisRole AxisDecision BatchPlan BatchPlanner MemoryBudget PlanMemory Vmap SafeMap Scan WhileCarry "
        "DedupGather Bucket AxisStrategy ScanTransition DedupFn GatherFn WhileBodyFn WhileCondFn CarrySpec CarryShape "
        "DedupSpec get_k_bucket select_bucket bucketize make_axis_dispatch axis_dispatch safe_map safe_scan "
        "MapIterator ScanIterator VmapIterator SafeMapIterator JaxScanIterator WhileLoopIterator DispatchRejected "
        "AmbiguousAxisError BudgetInfeasibleError RemainderWarning device_memory_budget lowered_memory_estimate "
        "memory_estimator + tune_batch_size TunedBatchSize find_duplicates suggest_boundaries map_ragged iter_ragged "
        "tiled_vmap tiled_apply tiled_jacfwd tiled_jacrev tiled_hessian execute_plan Reducer"
    ),
    "xtrax.tiling.plan": "AxisSpec AxisDecision BatchPlan BatchPlanner MemoryBudget",
    "xtrax.tiling.roles": "AxisRole AxisRole.KNOWN AxisRole.UNKNOWN",
    "xtrax.tiling.strategy": (
        "AxisStrategy Vmap SafeMap Scan WhileCarry DedupGather Bucket ScanTransition DedupFn GatherFn WhileBodyFn "
        "WhileCondFn"
    ),
    "xtrax.tiling.estimators": "device_memory_budget lowered_memory_estimate memory_estimator",
    "xtrax.tiling.carry": "CarrySpec CarryShape CarryShape.materialize",
    "xtrax.tiling.dedup": "DedupSpec DedupSpec.to_dedup_gather get_k_bucket + find_duplicates",
    "xtrax.tiling.bucket": "select_bucket bucketize + suggest_boundaries map_ragged iter_ragged",
    "xtrax.tiling.dispatch": "make_axis_dispatch axis_dispatch DispatchRejected",
    "xtrax.tiling.iterator": (
        "MapIterator ScanIterator VmapIterator SafeMapIterator JaxScanIterator WhileLoopIterator safe_map safe_scan"
    ),
    "xtrax.tiling.errors": "AmbiguousAxisError BudgetInfeasibleError DispatchRejected RemainderWarning",
    "xtrax.tiling.execute": "+ execute_plan",
    "xtrax.tiling.reducers": "+ Reducer mean sum max min var logsumexp count argmax topk histogram",
    "xtrax.inference": (
        "infer_bundle BundleSchema AxisOverride axis_config verify_structure StructureMismatchError + "
        "check_independence IndependenceReport"
    ),
    "xtrax.stages": (
        "AxisBoundary Fuse Tap Sink validate_plan_topology PlanTopologyError axis_boundaries_by_name execute_map_axis "
        "execute_scan_axis ExecutorError StageBundle TransformFn RollingFn StageGraph StageNode StageEdge dump_graph "
        "load_graph validate_graph GraphValidationResult Generator TemplateGenerator IoCallbackSignatureError + "
        "HostTap HostSink execute_plan compile_graph"
    ),
    "xtrax.stages._callback": "io_callback IoCallbackSignatureError",
    "xtrax.stages.boundaries": "AxisBoundary Fuse Tap Sink + HostTap HostSink",
    "xtrax.stages.topology": "validate_plan_topology PlanTopologyError axis_boundaries_by_name",
    "xtrax.stages.executor": "execute_map_axis execute_scan_axis ExecutorError + execute_plan",
    "xtrax.stages.bundle": "StageBundle StageBundle.active_stages StageBundle.has_stage TransformFn RollingFn",
    "xtrax.stages.graph": (
        "StageGraph StageNode StageEdge dump_graph load_graph validate_graph GraphValidationResult Generator "
        "TemplateGenerator + compile_graph"
    ),
    "xtrax.run": (
        "RunSpec RunSpec.from_spec InputResolver RuntimeBundle FeatureBatch SinkSpec make_sink StagingSink "
        "ZarrStagingSink derive_sink_spec new_run_id read_jsonl SinkError zarr_content_digest + run_tiled RunReport "
        "open_results verify_store IntegrityReport"
    ),
    "xtrax.run.spec": "RunSpec",
    "xtrax.run.resolver": "InputResolver RuntimeBundle FeatureBatch",
    "xtrax.run.sink": "SinkSpec make_sink derive_sink_spec new_run_id StagingSink SinkError",
    "xtrax.run.zarr_sink": "ZarrStagingSink",
    "xtrax.run.jsonl_sink": "JsonlStagingSink read_jsonl",
    "xtrax.run.h5_sink": "H5StagingSink",
    "xtrax.run.zarr_integrity": (
        "zarr_content_digest update_zarr_node_digest update_array_digest canonical_json_bytes normalize_json_value "
        "fsync_file fsync_directory fsync_tree + verify_store IntegrityReport"
    ),
    "xtrax.run.pipeline": "+ run_tiled RunReport",
    "xtrax.config": (
        "load_toml_document require_sections require_field classify_schema_version SchemaVersionStatus "
        "check_schema_version + load_dataclass"
    ),
    "xtrax.training": (
        "ResumableState init_state Trainer Trainer.step SafetyTrainStep SafetyManager create_train_step safe_norm "
        "safe_reciprocal Engine Engine.fit Engine.fit_sync Engine.eval Callback make_optimizer adamw_with_schedule "
        "no_bias_wd_mask partition_labels LossFunction WeightedLoss MultiTaskLoss accumulate_grads DataModule "
        "ArrayDataModule GrainDataModule get_checkpoint_manager save_checkpoint load_checkpoint PreemptionHandler "
        "init_dist is_distributed get_device_mesh get_hardware_mesh_profile ShardingPolicy LogicalMesh + ProgressBar "
        "MetricsLog Checkpoint EarlyStopping LearningRateMonitor"
    ),
    "xtrax.sparse": (
        "SparseConfig SparsePolicy SparsePolicy.make_mask SparsePolicy.apply_mask SparsePolicy.should_update "
        "SparseMaskManager SparseMaskManager.step SparseMaskManager.current_masks sparsify_model "
        "make_sparse_forward_fn sparse_filter_jit + prune_structured PruneReport choose_representation "
        "RepresentationReport SparsePolicy.for_model"
    ),
    "xtrax.sparse.inference": "sparsify_model make_sparse_forward_fn sparse_filter_jit",
    "xtrax.eda": (
        "extract_plan_stats explain_plan analyze_dedup analyze_bucket render plan_to_dataframe + compare_plans "
        "memory_profile run_report"
    ),
    "xtrax.eda.types": "",
    "xtrax.cli": "main REGISTRY load_fn CLIError CLIImportError ShapeParseError + load_run LoadedRun",
    "xtrax.cli.registry": "REGISTRY",
    "xtrax.cli.config": "TrainConfig ConfigError",
    "xtrax": (
        "__version__ versions AxisSpec AxisDecision BatchPlan BatchPlanner Vmap SafeMap Scan DedupGather Bucket "
        "CarrySpec DedupSpec MemoryBudget select_bucket bucketize make_axis_dispatch bounded_jit batched_jit "
        "AxisBoundary Fuse Tap Sink StageBundle RunSpec SinkSpec make_sink Trainer SafetyTrainStep Engine "
        "ResumableState init_state Callback make_optimizer adamw_with_schedule save_checkpoint load_checkpoint "
        "DataModule infer_bundle axis_config AxisOverride SparseConfig SparsePolicy sparsify_model "
        "make_sparse_forward_fn explain_plan render + tiled_vmap tiled_apply tiled_jacfwd tiled_jacrev tiled_hessian "
        "map_ragged find_duplicates HostTap HostSink execute_plan run_tiled open_results prune_structured"
    ),
}
VERBS = "plan explain export run resume sweep graph-validate graph-plan graph-author + runs init doctor"


def lookup(module: str, path: str) -> object:
    """The object at `module.path`.

    Raises:
        ImportError: There is no such module.
        AttributeError: It has no such name.
    """
    found: object = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def entries() -> list[tuple[str, bool, bool, str]]:
    """`(path, marked +, present, first line of the docstring)` for every name, and for every verb of the command."""
    rows = []
    for module, text in SURFACE.items():
        marked = False
        for name in text.split():
            if name == "+":
                marked = True
                continue
            try:
                value, present = lookup(module, name), True
            except (ImportError, AttributeError):
                value, present = None, False
            # A constant's or a type alias's docstring is that of its type, which says nothing.
            says = inspect.getdoc(value) if callable(value) or inspect.ismodule(value) else ""
            rows.append((f"{module}.{name}", marked, present, (says or "").partition("\n")[0]))
    marked = False
    for verb in VERBS.split():
        if verb == "+":
            marked = True
            continue
        try:
            registry = lookup("xtrax.cli.registry", "REGISTRY")
            present = verb in registry  # ty: ignore[unsupported-operator]
            says = inspect.getdoc(registry[verb][0]) if present else ""  # ty: ignore[not-subscriptable]
        except ImportError:
            present, says = False, ""
        rows.append((f"xtrax {verb}", marked, present, (says or "").partition("\n")[0]))
    return rows


def main() -> int:
    """Print the table; 1 if a name is absent that may not be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--absent", action="store_true", help="only what is missing")
    only_absent = parser.parse_args().absent
    rows = entries()
    width = max(len(path) for path, *_ in rows)
    for path, marked, present, says in rows:
        if not (present and only_absent):
            print(f"{path:{width}}  {'+' if marked else ' '}  {'present' if present else 'ABSENT '}  {says}".rstrip())
    missing = [path for path, marked, present, _ in rows if not present and not marked]
    later = [path for path, marked, present, _ in rows if not present and marked]
    print(f"surface: {len(rows)} names, {len(missing)} missing, {len(later)} marked + and not there yet")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
