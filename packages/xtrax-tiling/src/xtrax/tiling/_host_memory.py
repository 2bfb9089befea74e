"""How much memory the host lets this process have, as Linux tells."""

from pathlib import Path


def host_memory_limit(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """The smaller of the free memory and the limits of the control groups of this process; None if neither is known.

    Args:
        proc: where the kernel tells of memory and processes.
        cgroups: where the control groups are mounted, of version 1 or 2.
    """
    limits: list[int] = []
    for line in _lines(proc / "meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, file = cgroups, "memory.max"
        elif "memory" in controllers.split(","):
            root, file = cgroups / "memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        # A group is bound by those above it, and in a container the path may begin above what is mounted.
        for folder in (group, *group.parents):
            limits += [int(text) for text in _lines(root / folder / file) if text.isdigit()]
    return min(limits, default=None)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # not there, or not for us to read: then it tells nothing
        return []
