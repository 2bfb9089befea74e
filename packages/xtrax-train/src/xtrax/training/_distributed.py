"""Processes and devices: joining a run of several processes, and making a mesh."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from xtrax.training._checks import check_int

_initialized_with: dict[str, Any] = {}  # the process's connection is global in jax too, which does not tell it


def init_dist(
    *, coordinator_address: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Joins the processes of one run, by `jax.distributed.initialize`.

    Call it before anything else uses JAX. Under SLURM, Open MPI, Kubernetes or on Cloud TPU JAX finds the arguments
    itself. A second call with the same arguments, or with none, does nothing.

    Args:
        coordinator_address: `host:port` of process 0.
        num_processes: how many processes there are.
        process_id: which one this is, from 0.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a number out of range, or JAX finds no cluster and nothing was given.
        RuntimeError: joined already with other arguments, or JAX was used before.

    Example:
        >>> from xtrax.training import init_dist
        >>> init_dist(coordinator_address="localhost:1234", num_processes=2, process_id=2)
        Traceback (most recent call last):
        ValueError: process_id must be below num_processes=2, got 2
    """
    if coordinator_address is not None and not isinstance(coordinator_address, str):
        raise TypeError(f"coordinator_address must be a string host:port, got {coordinator_address!r}")
    if coordinator_address is not None and not _is_address(coordinator_address):
        raise ValueError(f"coordinator_address must be host:port, got {coordinator_address!r}")
    if num_processes is not None:
        check_int("num_processes", num_processes, at_least=1)
    if process_id is not None:
        check_int("process_id", process_id, at_least=0)
        if num_processes is not None and process_id >= num_processes:
            raise ValueError(f"process_id must be below num_processes={num_processes}, got {process_id}")
    given = {
        "coordinator_address": coordinator_address,
        "num_processes": num_processes,
        "process_id": process_id,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if jax.distributed.is_initialized():
        actual = {
            **_initialized_with,
            "num_processes": jax.process_count(),
            "process_id": jax.process_index(),
        }
        if other := {name: value for name, value in given.items() if actual.get(name, value) != value}:
            raise RuntimeError(
                f"this process has joined already with { ({name: actual[name] for name in other}) }, and init_dist is "
                f"called with {other}; call it once"
            )
        return
    try:
        jax.distributed.initialize(coordinator_address, num_processes, process_id)
    except ValueError as error:
        error.add_note(
            "init_dist: JAX found no cluster (SLURM, Open MPI, Kubernetes, Cloud TPU); pass coordinator_address, "
            "num_processes and process_id, or leave init_dist out for a single process"
        )
        raise
    _initialized_with.update(given)


def is_distributed() -> bool:
    """True if this process is one of several of a run.

    Example:
        >>> from xtrax.training import is_distributed
        >>> is_distributed()
        False
    """
    return jax.distributed.is_initialized() and jax.process_count() > 1


def get_device_mesh(
    shape: Sequence[int] | int, axis_names: Sequence[str] | str, *, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """A mesh of devices whose axes the compiler uses as it sees fit (`jax.sharding.AxisType.Auto`).

    Args:
        shape: the length of each axis; one may be -1, for all devices that are left.
        axis_names: their names.
        devices: by default all devices of all processes. Given none, and fewer than there are being asked for, the
            first are taken, if there is one process.

    Returns:
        A `jax.sharding.Mesh`.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: lengths or names that do not fit one another or the number of devices.

    Example:
        >>> from xtrax.training import get_device_mesh
        >>> mesh = get_device_mesh((-1, 1), ("data", "model"))
        >>> mesh.axis_names
        ('data', 'model')
    """
    names = (axis_names,) if isinstance(axis_names, str) else tuple(axis_names)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise TypeError(f"axis_names must be names, got {axis_names!r}")
    if len(set(names)) < len(names):
        raise ValueError(f"axis_names must be different, got {names}")
    lengths = list(shape) if isinstance(shape, Sequence) else [shape]
    if len(lengths) != len(names):
        raise ValueError(f"shape must have one length for each of {names}, got {tuple(lengths)}")
    for name, length in zip(names, lengths, strict=True):
        if check_int(f"the length of {name!r}", length, at_least=-1) == 0:
            raise ValueError(f"the length of {name!r} must be positive, or -1 for what is left, got 0")
    found = list(jax.devices() if devices is None else devices)
    rest = math.prod(length for length in lengths if length != -1)
    if lengths.count(-1) > 1:
        raise ValueError(f"at most one length may be -1, got {tuple(lengths)}")
    if -1 in lengths:
        if len(found) % rest:
            raise ValueError(f"{len(found)} devices cannot be divided by {rest}, for shape {tuple(lengths)}")
        lengths[lengths.index(-1)] = len(found) // rest
    wanted = math.prod(lengths)
    if devices is None and jax.process_count() == 1:
        found = found[:wanted]
    if len(found) != wanted:
        raise ValueError(f"shape {tuple(lengths)} needs {wanted} devices, and there are {len(found)}")
    auto = (AxisType.Auto,) * len(names)
    return jax.make_mesh(tuple(lengths), names, auto, devices=found)


@dataclass(frozen=True)
class HardwareMeshProfile:
    """What the devices of a run are, and the mesh that their network suggests.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        device_kind: the model of the devices, as JAX names it.
        num_devices: devices of all processes.
        num_local_devices: devices of this process.
        num_processes: processes.
        memory_bytes: memory of a device in bytes, or None where JAX cannot tell (CPU).
        suggested_shape: `(processes, devices of one)` where each has as many, else `(1, devices)`: traffic along the
            second axis stays inside a process.
    """

    platform: str
    device_kind: str
    num_devices: int
    num_local_devices: int
    num_processes: int
    memory_bytes: int | None
    suggested_shape: tuple[int, int]


def get_hardware_mesh_profile() -> HardwareMeshProfile:
    """Looks at the devices that JAX sees.

    Returns:
        Their number, kind and memory, and a mesh shape for them.

    Example:
        >>> from xtrax.training import get_hardware_mesh_profile
        >>> profile = get_hardware_mesh_profile()
        >>> profile.num_devices == profile.suggested_shape[0] * profile.suggested_shape[1]
        True
    """
    devices, local = jax.devices(), jax.local_devices()
    by_process = np.bincount([device.process_index for device in devices], minlength=jax.process_count())
    even = bool((by_process == by_process[0]).all())
    stats = local[0].memory_stats()
    return HardwareMeshProfile(
        platform=local[0].platform,
        device_kind=local[0].device_kind,
        num_devices=len(devices),
        num_local_devices=len(local),
        num_processes=jax.process_count(),
        memory_bytes=None if stats is None else stats.get("bytes_limit"),
        suggested_shape=(len(by_process), int(by_process[0])) if even else (1, len(devices)),
    )


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 <= int(port) < 2**16
