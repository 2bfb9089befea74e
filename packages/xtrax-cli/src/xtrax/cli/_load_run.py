"""A run back in Python, to predict with."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import equinox as eqx

from xtrax.cli._build import build
from xtrax.cli._defaults import RUNS_DIR
from xtrax.cli._errors import CLIError
from xtrax.cli._folder import find_run, read_manifest
from xtrax.cli._train import holds_checkpoint, readable_checkpoints
from xtrax.cli.config import TrainConfig, load_train_config
from xtrax.training import ResumableState, get_checkpoint_manager, load_checkpoint


@dataclass(frozen=True)
class LoadedRun:
    """A checkpoint of a run, and what it was trained with.

    Attributes:
        config: The configuration as it ran.
        model: The trained model, in inference mode. It takes a batch of inputs, or one example if the configuration
            says `vmap = true`.
        state: The training state; `state.model` is the model as training left it.
        data: The data module, made anew.
    """

    config: TrainConfig
    model: Any
    state: ResumableState
    data: Any


def load_run(
    run_id_or_path: str | os.PathLike[str], *, runs_dir: str | os.PathLike[str] = RUNS_DIR, best: bool = False
) -> LoadedRun:
    """Load the last checkpoint of a run of `xtrax run`, or the best.

    The code that the configuration names is imported and called again, from the folders that the run recorded.

    Args:
        run_id_or_path: The id of a run in `runs_dir`, or the path of a run's folder.
        runs_dir: The folder that holds the runs.
        best: Whether to load the state with the best value of what `best` in `[checkpoint]` names.

    Returns:
        The configuration, model, state and data.

    Raises:
        TypeError: If `run_id_or_path` is not a path, or `best` not a bool.
        CLIError: If there is no such run, or it has no such checkpoint or one that cannot be read, or its
            configuration cannot be built.
        ValueError: If the checkpoint does not fit what the configuration builds; the message names the leaf.
    """
    if not isinstance(run_id_or_path, str | os.PathLike):
        raise TypeError(f"run_id_or_path must be a run id or a path, got {run_id_or_path!r}")
    if not isinstance(best, bool):
        raise TypeError(f"best must be True or False, got {best!r}")
    path = Path(run_id_or_path)
    given_a_path = isinstance(run_id_or_path, os.PathLike) or len(path.parts) != 1
    if given_a_path and not (path / "manifest.json").is_file():
        raise CLIError(f"{path} is not the folder of a run: it has no manifest.json")
    folder = path if given_a_path else find_run(runs_dir, str(run_id_or_path))
    manifest = read_manifest(folder)
    if manifest.get("kind") == "sweep":
        raise CLIError(f"{folder.name} is a sweep; load one of its points, a folder in {folder / 'points'}")
    checkpoints = folder / "checkpoints" / "best" if best else folder / "checkpoints"
    if not holds_checkpoint(checkpoints):
        which = "best checkpoint; name an evaluation result as best in [checkpoint]" if best else "checkpoint yet"
        raise CLIError(f"run {folder.name} has no {which}")
    config, document = load_train_config(folder / "config.toml")
    built = build(config, document, manifest["import_paths"])
    with readable_checkpoints(folder), get_checkpoint_manager(checkpoints) as manager:
        state = load_checkpoint(manager, built.state)
    return LoadedRun(config, eqx.nn.inference_mode(state.model), state, built.data)
