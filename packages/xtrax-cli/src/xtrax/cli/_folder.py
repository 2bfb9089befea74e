"""The folder of a run: made for one run alone, with a manifest that is always whole."""

import contextlib
import dataclasses
import datetime
import difflib
import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from xtrax.cli._errors import CLIError
from xtrax.cli.config import TrainConfig
from xtrax.run import write_json_atomic

MANIFEST_VERSION = 1
_NEEDED = {"run_id": str, "kind": str, "status": str, "source": str, "overrides": list, "import_paths": list}
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def run_id_of(config: TrainConfig) -> str:
    """12 hex digits of the sha256 of a configuration, defaults included."""
    text = json.dumps(dataclasses.asdict(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def find_run(runs_dir: str | os.PathLike[str], run_id: str) -> Path:
    """The folder of a run.

    Raises:
        CLIError: If there is no such run, or its id is not the name of a folder in `runs_dir`.
    """
    runs = Path(runs_dir)
    if not _RUN_ID.fullmatch(run_id):
        raise CLIError(f"{run_id!r} is not a run id: it must be the name of a folder in {runs}, without separators")
    folder = runs / run_id
    if (folder / "manifest.json").is_file():
        return folder
    known = sorted(entry.name for entry in runs.iterdir() if entry.is_dir()) if runs.is_dir() else []
    close = difflib.get_close_matches(run_id, known, 1) or [name for name in known if name.startswith(run_id)]
    hint = f"did you mean {close[0]}?" if close else f"it holds {', '.join(known[-5:]) or 'no runs'}; see --runs-dir"
    raise CLIError(f"there is no run {run_id!r} in {runs}; {hint}")


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a run.

    Raises:
        CLIError: If it cannot be read, or is of another version.
    """
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CLIError(f"{path} cannot be read ({error}); the folder is not that of a run") from error
    version = manifest.get("schema_version") if isinstance(manifest, dict) else None
    if version != MANIFEST_VERSION:
        raise CLIError(f"{path} has schema_version {version}; this version of xtrax reads {MANIFEST_VERSION}")
    for name, kind in _NEEDED.items():
        if not isinstance(manifest.get(name), kind):
            found = f"{manifest[name]!r} as" if name in manifest else "no"
            raise CLIError(
                f"{path} has {found} {name}, which xtrax writes: it has been changed, or is of another program"
            )
    return manifest


class RunFolder:
    """A run's folder, held by this process alone until `close`.

    Attributes:
        path: The folder.
        manifest: What `manifest.json` says.
        is_new: Whether this process made the folder, and so may remove it.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any], *, parents: list[Path] | None = None) -> None:
        """Lock the folder; use `create` or `reopen`."""
        self.path = path
        self.manifest = dict(manifest)
        self.is_new = parents is not None
        self._parents = parents or []
        self._before = dict(manifest)
        self._lock = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system drops it when the process ends
        except OSError:
            os.close(self._lock)
            by = f"process {manifest['pid']} on {manifest.get('host')}" if "pid" in manifest else "another process"
            raise CLIError(f"run {path.name} is in use by {by}; wait for it, or stop it") from None

    @classmethod
    def create(
        cls, runs_dir: str | os.PathLike[str], config: TrainConfig, config_text: bytes, about: Mapping[str, Any]
    ) -> Self:
        """Make a folder that no other run has, with the configuration and a manifest in it.

        Raises:
            CLIError: If it cannot be made or written; nothing is left.
        """
        runs, parents, path = Path(runs_dir), [], None
        try:
            path = _make_folder(runs, run_id_of(config), parents)
            folder = cls(path, {"schema_version": MANIFEST_VERSION, "run_id": path.name, **about}, parents=parents)
            (path / "config.toml").write_bytes(config_text)
            folder.update(config=jsonable(dataclasses.asdict(config)), **_status("running"))
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            _remove_empty(parents)
            raise _not_made(error, path or runs) from error
        return folder

    @classmethod
    def create_named(cls, path: Path, config_text: bytes, about: Mapping[str, Any]) -> Self:
        """Make the folder of this very name, with the configuration and a manifest in it.

        Raises:
            CLIError: If it cannot be made or written, or another process is making it.
        """
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, {"schema_version": MANIFEST_VERSION, "run_id": path.name, **about})
            (path / "config.toml").write_bytes(config_text)
            folder.update(**_status("running"))
        except OSError as error:
            raise _not_made(error, path) from error
        return folder

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Take over a run whose process has ended.

        Raises:
            CLIError: If it is in use, its manifest cannot be read, or the folder cannot be written.
        """
        try:
            folder = cls(path, read_manifest(path))
        except OSError as error:
            raise CLIError(f"cannot write to {path}: {error.strerror}") from error
        return folder

    def update(self, **changes: Any) -> None:
        """Change the manifest."""
        self.manifest = {**self.manifest, **changes}
        write_json_atomic(self.path / "manifest.json", self.manifest)

    def start(self) -> None:
        """Record that this process runs it."""
        self.update(**_status("running"))

    def finish(self, status: str, **changes: Any) -> None:
        """Record how it ended."""
        self.update(status=status, finished_at=_now(), **changes)

    def discard(self) -> None:
        """Undo: remove a folder that this process made, or put the manifest back as it was."""
        if self.is_new:
            shutil.rmtree(self.path)
            _remove_empty(self._parents)
        elif self.manifest != self._before:
            write_json_atomic(self.path / "manifest.json", self._before)
        self.close()

    def close(self) -> None:
        """Let other processes have it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def jsonable(value: Any) -> Any:
    """A value as JSON can hold it: what it has no form for, such as a date or NaN, as text."""
    if isinstance(value, dict):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _status(status: str) -> dict[str, Any]:
    return {
        "status": status,
        "started_at": _now(),
        "finished_at": None,
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }


def _not_made(error: OSError, path: Path) -> CLIError:
    where = error.filename or path
    return CLIError(
        f"cannot make a run folder: {where}: {error.strerror}; make room there or name another by --runs-dir"
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _make_folder(runs: Path, name: str, parents: list[Path]) -> Path:
    """A new folder in `runs`; `parents` gets the folders above it that were made, outermost first."""
    for attempt in range(1, 10_000):
        path = runs / (name if attempt == 1 else f"{name}-{attempt}")
        for parent in [*reversed(runs.parents), runs]:
            with contextlib.suppress(FileExistsError):
                parent.mkdir()
                parents.append(parent)
        # mkdir fails if it is there, so that two runs never share one; and if another run, giving up, has just
        # removed the parents that were empty.
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            path.mkdir()
            return path
    raise CLIError(f"{runs} holds too many runs called {name}; remove some")


def _remove_empty(parents: list[Path]) -> None:
    for parent in reversed(parents):
        with contextlib.suppress(OSError):
            parent.rmdir()
