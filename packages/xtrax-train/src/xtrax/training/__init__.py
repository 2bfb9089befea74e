"""Training of Equinox models that can be stopped and resumed in the same bits."""

from xtrax.training._accumulate import accumulate_grads
from xtrax.training._callbacks import Callback, FitContext, StepMetrics
from xtrax.training._checkpoint import get_checkpoint_manager, load_checkpoint, load_progress, save_checkpoint
from xtrax.training._checkpoint_callback import Checkpoint
from xtrax.training._data import ArrayDataModule, DataModule
from xtrax.training._distributed import (
    HardwareMeshProfile,
    get_device_mesh,
    get_hardware_mesh_profile,
    init_dist,
    is_distributed,
)
from xtrax.training._early_stopping import EarlyStopping
from xtrax.training._engine import Engine
from xtrax.training._grain_data import GrainDataModule
from xtrax.training._learning_rate import LearningRateMonitor
from xtrax.training._losses import LossFunction, MultiTaskLoss, WeightedLoss
from xtrax.training._metrics_log import MetricsLog
from xtrax.training._numerics import safe_norm, safe_reciprocal
from xtrax.training._optimizers import adamw_with_schedule, make_optimizer, no_bias_wd_mask, partition_labels
from xtrax.training._preemption import PreemptionHandler
from xtrax.training._progress import ProgressBar
from xtrax.training._safety import SafetyError, SafetyManager, SafetyTrainStep, create_train_step
from xtrax.training._sharding import LogicalMesh, ShardingPolicy
from xtrax.training._state import ResumableState, init_state
from xtrax.training._trainer import Trainer
from xtrax.training._version import __version__

__all__ = [
    "ArrayDataModule",
    "Callback",
    "Checkpoint",
    "DataModule",
    "EarlyStopping",
    "Engine",
    "FitContext",
    "GrainDataModule",
    "HardwareMeshProfile",
    "LearningRateMonitor",
    "LogicalMesh",
    "LossFunction",
    "MetricsLog",
    "MultiTaskLoss",
    "PreemptionHandler",
    "ProgressBar",
    "ResumableState",
    "SafetyError",
    "SafetyManager",
    "SafetyTrainStep",
    "ShardingPolicy",
    "StepMetrics",
    "Trainer",
    "WeightedLoss",
    "__version__",
    "accumulate_grads",
    "adamw_with_schedule",
    "create_train_step",
    "get_checkpoint_manager",
    "get_device_mesh",
    "get_hardware_mesh_profile",
    "init_dist",
    "init_state",
    "is_distributed",
    "load_checkpoint",
    "load_progress",
    "make_optimizer",
    "no_bias_wd_mask",
    "partition_labels",
    "safe_norm",
    "safe_reciprocal",
    "save_checkpoint",
]
