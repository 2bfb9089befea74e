"""The layer before `jax.jit`: every xtrax package under one name, resolved on first use.

`import xtrax` imports neither jax nor any layer; `xtrax.AxisSpec` or `xtrax.tiling` imports the layer that it
lies in. See `xtrax.versions()` for what is installed.
"""

__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from typing import TYPE_CHECKING

from xtrax import _lazy
from xtrax._version import __version__ as __version__

if TYPE_CHECKING:
    from xtrax import cli as cli
    from xtrax import config as config
    from xtrax import eda as eda
    from xtrax import inference as inference
    from xtrax import jit as jit
    from xtrax import run as run
    from xtrax import sparse as sparse
    from xtrax import stages as stages
    from xtrax import tiling as tiling
    from xtrax import training as training
    from xtrax._lazy import versions as versions
    from xtrax.eda import explain_plan as explain_plan
    from xtrax.eda import render as render
    from xtrax.inference import AxisOverride as AxisOverride
    from xtrax.inference import axis_config as axis_config
    from xtrax.inference import infer_bundle as infer_bundle
    from xtrax.jit import batched_jit as batched_jit
    from xtrax.jit import bounded_jit as bounded_jit
    from xtrax.run import RunSpec as RunSpec
    from xtrax.run import SinkSpec as SinkSpec
    from xtrax.run import make_sink as make_sink
    from xtrax.run import open_results as open_results
    from xtrax.run import run_tiled as run_tiled
    from xtrax.sparse import SparseConfig as SparseConfig
    from xtrax.sparse import SparsePolicy as SparsePolicy
    from xtrax.sparse import make_sparse_forward_fn as make_sparse_forward_fn
    from xtrax.sparse import prune_structured as prune_structured
    from xtrax.sparse import sparsify_model as sparsify_model
    from xtrax.stages import AxisBoundary as AxisBoundary
    from xtrax.stages import Fuse as Fuse
    from xtrax.stages import HostSink as HostSink
    from xtrax.stages import HostTap as HostTap
    from xtrax.stages import Sink as Sink
    from xtrax.stages import StageBundle as StageBundle
    from xtrax.stages import Tap as Tap
    from xtrax.stages import execute_plan as execute_plan
    from xtrax.tiling import AxisDecision as AxisDecision
    from xtrax.tiling import AxisSpec as AxisSpec
    from xtrax.tiling import BatchPlan as BatchPlan
    from xtrax.tiling import BatchPlanner as BatchPlanner
    from xtrax.tiling import Bucket as Bucket
    from xtrax.tiling import CarrySpec as CarrySpec
    from xtrax.tiling import DedupGather as DedupGather
    from xtrax.tiling import DedupSpec as DedupSpec
    from xtrax.tiling import MemoryBudget as MemoryBudget
    from xtrax.tiling import SafeMap as SafeMap
    from xtrax.tiling import Scan as Scan
    from xtrax.tiling import Vmap as Vmap
    from xtrax.tiling import bucketize as bucketize
    from xtrax.tiling import find_duplicates as find_duplicates
    from xtrax.tiling import make_axis_dispatch as make_axis_dispatch
    from xtrax.tiling import map_ragged as map_ragged
    from xtrax.tiling import select_bucket as select_bucket
    from xtrax.tiling import tiled_apply as tiled_apply
    from xtrax.tiling import tiled_hessian as tiled_hessian
    from xtrax.tiling import tiled_jacfwd as tiled_jacfwd
    from xtrax.tiling import tiled_jacrev as tiled_jacrev
    from xtrax.tiling import tiled_vmap as tiled_vmap
    from xtrax.training import Callback as Callback
    from xtrax.training import DataModule as DataModule
    from xtrax.training import Engine as Engine
    from xtrax.training import ResumableState as ResumableState
    from xtrax.training import SafetyTrainStep as SafetyTrainStep
    from xtrax.training import Trainer as Trainer
    from xtrax.training import adamw_with_schedule as adamw_with_schedule
    from xtrax.training import init_state as init_state
    from xtrax.training import load_checkpoint as load_checkpoint
    from xtrax.training import make_optimizer as make_optimizer
    from xtrax.training import save_checkpoint as save_checkpoint

__all__ = ["__version__", *_lazy.NAMES]

if not TYPE_CHECKING:  # a checker that saw this would take every misspelt name for one that exists

    def __getattr__(name: str) -> object:
        value = _lazy.resolve(name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
