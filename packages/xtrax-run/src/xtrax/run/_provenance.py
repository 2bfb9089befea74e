"""Where a result comes from: code, versions, device, time."""

import datetime
import importlib.metadata
import os
import platform
import subprocess
import warnings
from typing import Any

from xtrax.run._checks import check_path

# Named here because a distribution's name cannot be told from its import name alone.
_DISTRIBUTIONS = (
    "xtrax",
    "xtrax-jit",
    "xtrax-tiling",
    "xtrax-stages",
    "xtrax-run",
    "xtrax-train",
    "xtrax-sparse",
    "xtrax-eda",
    "xtrax-cli",
    "jax",
    "jaxlib",
)


def collect_provenance(folder: str | os.PathLike[str] = ".") -> dict[str, Any]:
    """What is needed to tell, and repeat, where a result came from.

    Starts jax's default backend, to name the device.

    Args:
        folder: A folder of the code that runs; its git repository is recorded.

    Returns:
        A dict that JSON can hold: `created_at` (UTC, ISO 8601), `git` (`sha`, `branch` and `dirty`, whether tracked
        files were changed; each `"unknown"` outside a repository), `versions` (of the installed xtrax layers, jax and
        jaxlib), `python`, `platform`, `device_kind` and `device_count`.

    Raises:
        TypeError: If `folder` is no path.

    Warns:
        UserWarning: Once a call, if git is missing or `folder` is in no repository with a commit.

    Examples:
        >>> import warnings
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")
        ...     provenance = collect_provenance()
        >>> sorted(provenance["git"])
        ['branch', 'dirty', 'sha']
        >>> provenance["created_at"].endswith("+00:00")
        True
    """
    import jax  # here, so that importing xtrax.run stays quick

    git, problem = _git(check_path(folder, "folder", "a folder of the code"))
    if problem:
        warnings.warn(f"the code's git commit is recorded as unknown: {problem}", stacklevel=2)
    return {
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": git,
        "versions": _versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
    }


def _versions() -> dict[str, str]:
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a layer that is not installed
    return versions


def _git(folder: str | os.PathLike[str]) -> tuple[dict[str, Any], str | None]:
    """The state of the repository, or unknowns and the reason."""
    unknown = {"sha": "unknown", "branch": "unknown", "dirty": "unknown"}
    # --no-optional-locks: looking must not write the index. Untracked files do not count: a run's output is one.
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=30)
    except FileNotFoundError:
        return unknown, f"git or the folder {os.fspath(folder)} is not there"
    except (OSError, subprocess.TimeoutExpired) as error:
        return unknown, f"git did not answer: {error}"
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"git exited with {done.returncode}"]
        return unknown, reason[0].removeprefix("fatal: ")
    lines = done.stdout.splitlines()
    header = dict(line[2:].partition(" ")[::2] for line in lines if line.startswith("# "))
    if header.get("branch.oid", "(initial)") == "(initial)":
        return unknown, "the repository has no commit yet"
    dirty = any(not line.startswith("#") for line in lines)
    return {"sha": header["branch.oid"], "branch": header["branch.head"], "dirty": dirty}, None
