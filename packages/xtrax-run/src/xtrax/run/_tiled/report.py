"""What a tiled run reports, and how its memory is measured."""

import resource
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from xtrax.run._words import in_bytes, plural


@dataclass(frozen=True)
class RunReport:
    """What a call of `run_tiled` did.

    Attributes:
        run_id: The run; None without a sink.
        output_dir: Where its output lies; None without a sink. `open_results` reads it.
        tiles: How many tiles the run has.
        tiles_done: How many this call computed.
        tiles_skipped: How many were committed before.
        seconds_computing: Time in which the device computed, or host functions ran.
        seconds_reading: Time in which inputs were read, beside the computation.
        seconds_writing: Time in which output was written, beside the computation.
        seconds_waiting: Time in which the device had nothing to compute, for want of inputs or of room for outputs.
        seconds_starting: Before the first tile: tracing, compiling, looking at what is committed.
        seconds: All of it.
        bytes_read: Bytes of inputs read by this call.
        bytes_written: Bytes of output and states committed by this call.
        compiles: Programs compiled by this call (by all workers, with a client): one for each number of rows.
        peak_memory: The process's largest resident size while tiles were computed, in bytes.
        outputs: Without a sink, what `execute_plan` would return, as numpy arrays; else None.
    """

    run_id: str | None
    output_dir: Path | None
    tiles: int
    tiles_done: int
    tiles_skipped: int
    seconds_computing: float
    seconds_reading: float
    seconds_writing: float
    seconds_waiting: float
    seconds_starting: float
    seconds: float
    bytes_read: int
    bytes_written: int
    compiles: int
    peak_memory: int
    outputs: Any = field(default=None, repr=False)  # arrays, of any size

    def __str__(self) -> str:
        """A few lines for the terminal."""
        where = f"run {self.run_id} in {self.output_dir}" if self.output_dir else "run without a sink"
        return (
            f"{where}: {plural(self.tiles_done, 'tile')} done, {self.tiles_skipped} skipped, of {self.tiles}\n"
            f"  {self.seconds:.1f} s: starting {self.seconds_starting:.1f} s, "
            f"computing {self.seconds_computing:.1f} s, waiting {self.seconds_waiting:.1f} s; "
            f"beside that reading {self.seconds_reading:.1f} s, writing {self.seconds_writing:.1f} s\n"
            f"  read {in_bytes(self.bytes_read)}, wrote {in_bytes(self.bytes_written)}, "
            f"{plural(self.compiles, 'compile')}, peak memory {in_bytes(self.peak_memory)}"
        )

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """The same lines as the value of a notebook's cell."""
        printer.text(str(self))


def reset_peak_memory() -> None:
    """Forget the process's peak so far, which compiling dominates. Only Linux can."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return  # not Linux, or not allowed: the peak then includes what came before


def peak_memory() -> int:
    """The process's largest resident size, in bytes, since `reset_peak_memory` where that works."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
