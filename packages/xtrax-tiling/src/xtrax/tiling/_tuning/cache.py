"""What was measured before: in this process, and in a folder with one file for each program and machine.

A file is `{"format": "xtrax.tiling.TunedBatchSize", "schema_version": 1, "key": {...}, "batch_size": ...,
"measurements": [[size, seconds], ...]}`, named by the digest of its key. It is written under another name and then
renamed, so a reader sees all of it or nothing; what is torn or of another kind is measured anew, and replaced.
"""

import contextlib
import hashlib
import json
import math
import os
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from xtrax.tiling._check import check_int
from xtrax.tiling._tuning.measure import TunedBatchSize

FORMAT = "xtrax.tiling.TunedBatchSize"
SCHEMA_VERSION = 1
_LIMIT = 512

# A measurement is a property of the machine and the program, and takes seconds: one process takes it once.
_MEASURED: "OrderedDict[str, TunedBatchSize]" = OrderedDict()


def digest_of(key: Mapping[str, Any]) -> str:
    """The digest by which a key is found."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def recall(key: Mapping[str, Any], folder: Path | None) -> TunedBatchSize | None:
    """What was measured in this process, or is in the folder."""
    digest = digest_of(key)
    found = _MEASURED.get(digest)
    if folder is None:
        return found
    path = folder / f"{digest}.json"
    stored = _read(path, key)
    if found is None:
        if stored is not None:
            _remember(digest, stored)
        return stored
    if stored is None:
        _write(path, key, found)
    return found


def keep(key: Mapping[str, Any], tuned: TunedBatchSize, folder: Path | None) -> None:
    """Remember a measurement, and write it into the folder."""
    digest = digest_of(key)
    _remember(digest, tuned)
    if folder is not None:
        _write(folder / f"{digest}.json", key, tuned)


def forget() -> None:
    """Measure everything anew in this process; files stay."""
    _MEASURED.clear()


def _remember(digest: str, tuned: TunedBatchSize) -> None:
    _MEASURED[digest] = tuned
    if len(_MEASURED) > _LIMIT:
        _MEASURED.popitem(last=False)


def _read(path: Path, key: Mapping[str, Any]) -> TunedBatchSize | None:
    """What the file holds; None, with a warning if it is there, where that is not a measurement of this key."""
    try:
        text = path.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        _warn(f"the measurement in {path} cannot be read, and is taken anew: {error}")
        return None
    try:
        document = json.loads(text)
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT!r}")
        if document.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {document.get('schema_version')!r}, not {SCHEMA_VERSION}")
        if document.get("key") != key:
            raise ValueError("it is of another program or machine")
        pairs = {check_int("a size", size, 1): _seconds(seconds) for size, seconds in document["measurements"]}
        batch_size = check_int("batch_size", document["batch_size"], 1)
        if batch_size not in pairs:
            raise ValueError(f"its batch_size {batch_size} was not measured")
        return TunedBatchSize(batch_size, pairs)
    except (ValueError, TypeError, KeyError) as error:
        _warn(f"{path} is no measurement, and is replaced: {error}")
        return None


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def _write(path: Path, key: Mapping[str, Any], tuned: TunedBatchSize) -> None:
    document = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "key": dict(key),
        "batch_size": tuned.batch_size,
        "measurements": [list(pair) for pair in tuned.measurements.items()],
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".tuned-", suffix=".partial")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(document, file, indent=1)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        _warn(f"the measurement is not kept in {path.parent}, and only in this process: {error}")


def _warn(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=4)
