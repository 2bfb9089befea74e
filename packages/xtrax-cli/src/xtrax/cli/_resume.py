"""`xtrax resume`: go on with a run, in a new one beside it or in its own folder."""

import shutil
from pathlib import Path

from xtrax.cli._build import build
from xtrax.cli._errors import CLIError, tell
from xtrax.cli._folder import RunFolder, find_run, read_manifest
from xtrax.cli._interrupt import raise_if_interrupted
from xtrax.cli._report import resume_command, typed
from xtrax.cli._train import has_checkpoint, readable_checkpoints, train
from xtrax.cli.config import load_train_config
from xtrax.config import dump_toml
from xtrax.training import get_checkpoint_manager, load_progress


def resume(run_id: str, epochs: int | None, in_place: bool, runs_dir: Path, *, began: float) -> int:
    """Go on from the last checkpoint of a run.

    Args:
        run_id: The run.
        epochs: How many more epochs, in a new run, at least 1. An epoch that was left in its middle counts as one of
            them. None if `in_place`.
        in_place: Instead, finish the run in its own folder.
        runs_dir: The folder that holds the runs.
        began: `time.perf_counter()` when the command began.

    Returns:
        The exit code, as of `run`.

    Raises:
        CLIError: If there is no such run, it has no checkpoint, or its code or configuration no longer fit it.
        RunError: If it failed after a step.
    """
    old = find_run(runs_dir, run_id)
    manifest = read_manifest(old)
    if manifest.get("kind") == "sweep":
        raise CLIError(f"{run_id} is a sweep; go on with it by {typed('xtrax')} sweep {manifest['source']}")
    if in_place and manifest["status"] == "finished":
        raise CLIError(f"run {run_id} is finished; for more: {resume_command(old, '--epochs N')}")
    if not has_checkpoint(old):
        anew = f"{typed('xtrax')} run {manifest['source']}"
        raise CLIError(f"run {run_id} has no checkpoint, it stopped before one was saved; start anew: {anew}")
    if in_place:
        config, document = load_train_config(old / "config.toml")
        folder = RunFolder.reopen(old)
        try:
            _last_checkpoint(old)
            built = build(config, document, manifest["import_paths"])
            raise_if_interrupted()
            folder.start()
        except BaseException:
            folder.close()
            raise
        return train(config, built, folder, resume=True, began=began)

    step, done = _last_checkpoint(old)
    config, document = load_train_config(old / "config.toml", [f"num_epochs={done + (epochs or 0)}"])
    built = build(config, document, manifest["import_paths"])
    raise_if_interrupted()
    about = {name: manifest[name] for name in ("kind", "source", "overrides", "import_paths")}
    folder = RunFolder.create(runs_dir, config, dump_toml(document).encode(), {**about, "parent": run_id})
    try:
        shutil.copytree(old / "checkpoints" / str(step), folder.path / "checkpoints" / str(step))
        if (old / "metrics.zarr").is_dir():
            shutil.copytree(old / "metrics.zarr", folder.path / "metrics.zarr")
    except (OSError, shutil.Error, KeyboardInterrupt) as error:
        folder.discard()
        if isinstance(error, KeyboardInterrupt):
            raise
        raise CLIError(f"cannot copy the checkpoint of run {run_id}, and left nothing: {tell(error)}") from error
    return train(config, built, folder, resume=True, began=began)


def _last_checkpoint(folder: Path) -> tuple[int, int]:
    """The step of the last checkpoint, and the epochs that were complete in it."""
    with readable_checkpoints(folder), get_checkpoint_manager(folder / "checkpoints") as manager:
        return manager.latest_step() or 0, load_progress(manager)["epoch"]
