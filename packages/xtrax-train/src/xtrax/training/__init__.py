"""Training of Equinox models that can be stopped and resumed in the same bits."""

from xtrax.training._callbacks import Callback, FitContext, StepMetrics
from xtrax.training._checkpoint import get_checkpoint_manager, load_checkpoint, load_progress, save_checkpoint
from xtrax.training._checkpoint_callback import Checkpoint
from xtrax.training._data import ArrayDataModule, DataModule
from xtrax.training._engine import Engine
from xtrax.training._metrics_log import MetricsLog
from xtrax.training._progress import ProgressBar
from xtrax.training._state import ResumableState, init_state
from xtrax.training._trainer import Trainer
from xtrax.training._version import __version__

__all__ = [
    "ArrayDataModule",
    "Callback",
    "Checkpoint",
    "DataModule",
    "Engine",
    "FitContext",
    "MetricsLog",
    "ProgressBar",
    "ResumableState",
    "StepMetrics",
    "Trainer",
    "__version__",
    "get_checkpoint_manager",
    "init_state",
    "load_checkpoint",
    "load_progress",
    "save_checkpoint",
]
