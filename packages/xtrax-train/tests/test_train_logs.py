"""MetricsLog and ProgressBar."""

import io
import json
import math
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from rich.console import Console

from xtrax.training import Engine, MetricsLog, ProgressBar, Trainer


class Keep:
    def __init__(self):
        self.rows = []
        self.evals = []

    def on_step_end(self, state, metrics):
        self.rows.append({"step": metrics.step, "epoch": metrics.epoch, **metrics})

    def on_eval_end(self, state, epoch, metrics):
        self.evals.append({"step": int(state.step), "epoch": epoch, **metrics})


def train(state, data, optimizer, callbacks, **kwargs):
    def loss_fn(predictions, targets):
        error = (predictions - targets)[:, 0]
        return error**2, {"largest": jnp.max(jnp.abs(error))}

    engine = Engine(Trainer(loss_fn, optimizer, vmap=True), callbacks, steps_per_call=2)
    return engine.fit_sync(state, data, 2, **kwargs)


def read(path, kind):
    """The columns of one kind of row."""
    folders = sorted(entry for entry in (path / kind).iterdir() if entry.is_dir())
    return {folder.name: np.asarray(zarr.open_array(str(folder), mode="r")[:]) for folder in folders}


def columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_zarr_has_every_row(dropout_state, optimizer, array_data, tmp_path):
    keep = Keep()
    train(dropout_state, array_data, optimizer, [keep, MetricsLog(tmp_path / "log.zarr")])
    for kind, rows in (("train", keep.rows), ("eval", keep.evals)):
        arrays = read(tmp_path / "log.zarr", kind)
        expected = columns(rows)
        assert arrays.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(arrays[name], values)
            assert arrays[name].dtype == ("int64" if name in ("step", "epoch") else "float64")
    assert read(tmp_path / "log.zarr", "train")["step"].tolist() == list(range(1, 15))


def test_jsonl_has_every_row_in_order(dropout_state, optimizer, array_data, tmp_path):
    keep = Keep()
    train(dropout_state, array_data, optimizer, [keep, MetricsLog(tmp_path / "a" / "log.jsonl")])
    rows = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    expected = [{"kind": "train", **row} for row in keep.rows]
    expected.insert(7, {"kind": "eval", **keep.evals[0]})
    expected.append({"kind": "eval", **keep.evals[1]})
    assert rows == expected


def test_every_nth_step(dropout_state, optimizer, array_data, tmp_path):
    train(dropout_state, array_data, optimizer, [MetricsLog(tmp_path / "log.zarr", every=4)])
    assert read(tmp_path / "log.zarr", "train")["step"].tolist() == [4, 8, 12]


@pytest.mark.parametrize("name", ["log.zarr", "log.jsonl"])
def test_a_value_that_is_not_finite(name, dropout_state, optimizer, tmp_path):
    class Data:
        def train_iter(self):
            yield {"inputs": np.full((2, 3), np.nan, "float32"), "targets": np.zeros((2, 1), "float32")}

    train(dropout_state, Data(), optimizer, [MetricsLog(tmp_path / name)])
    if name == "log.jsonl":
        rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        assert [row["loss"] for row in rows] == [None, None]
    else:
        assert [math.isnan(x) for x in read(tmp_path / name, "train")["loss"]] == [True, True]


@pytest.mark.parametrize("name", ["log.zarr", "log.jsonl"])
def test_the_rows_of_another_run_are_not_overwritten(name, dropout_state, optimizer, array_data, tmp_path):
    train(dropout_state, array_data, optimizer, [MetricsLog(tmp_path / name)])
    with pytest.raises(FileExistsError, match="another path"):
        train(dropout_state, array_data, optimizer, [MetricsLog(tmp_path / name)])


def test_a_torn_last_line_is_cut(dropout_state, optimizer, array_data, tmp_path):
    path = tmp_path / "log.jsonl"
    train(dropout_state, array_data, optimizer, [MetricsLog(path)], checkpoint_dir=tmp_path / "checkpoints")
    before = path.read_text()
    path.write_text(before + '{"kind": "train", "st')
    train(
        dropout_state, array_data, optimizer, [MetricsLog(path)], checkpoint_dir=tmp_path / "checkpoints", resume=True
    )
    assert path.read_text() == before


def test_columns_of_unequal_length_are_cut(dropout_state, optimizer, array_data, tmp_path):
    path, folder = tmp_path / "log.zarr", tmp_path / "checkpoints"
    train(dropout_state, array_data, optimizer, [MetricsLog(path)], checkpoint_dir=folder)
    zarr.open_array(str(path / "train" / "step"), mode="r+").append(np.array([15, 16]))
    train(dropout_state, array_data, optimizer, [MetricsLog(path)], checkpoint_dir=folder, resume=True)
    columns = read(path, "train")
    assert {column.shape for column in columns.values()} == {(14,)}
    assert columns["step"].tolist() == list(range(1, 15))


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"path": 3}, TypeError),
        ({"path": "log.csv"}, ValueError),
        ({"path": "log"}, ValueError),
        ({"every": 0}, ValueError),
        ({"every": True}, TypeError),
    ],
)
def test_bad_log_argument(kwargs, error):
    arguments: dict[str, Any] = {"path": "log.zarr", **kwargs}
    with pytest.raises(error, match=next(iter(kwargs))):
        MetricsLog(**arguments)


def test_a_file_that_is_no_log(dropout_state, optimizer, array_data, tmp_path):
    (tmp_path / "log.jsonl").write_text("hello\n")
    with pytest.raises(ValueError, match="no metrics log"):
        train(dropout_state, array_data, optimizer, [MetricsLog(tmp_path / "log.jsonl")])


def test_a_pipe_gets_one_plain_line_for_each_epoch(dropout_state, optimizer, array_data):
    keep, out = Keep(), io.StringIO()
    train(dropout_state, array_data, optimizer, [keep, ProgressBar(Console(file=out))])
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert all(character.isprintable() for line in lines for character in line)
    for epoch, line in enumerate(lines):
        losses = [row["loss"] for row in keep.rows if row["epoch"] == epoch]
        match = re.fullmatch(r"epoch (\d)/2  loss (\S+)  largest \S+  eval loss (\S+)  \S+ steps/s", line)
        assert match is not None
        assert int(match[1]) == epoch + 1
        assert float(match[2]) == pytest.approx(np.mean(losses), rel=1e-3)
        assert float(match[3]) == pytest.approx(keep.evals[epoch]["loss"], rel=1e-3)


def test_a_terminal_gets_a_bar_and_keeps_the_lines(dropout_state, optimizer, array_data):
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    train(dropout_state, array_data, optimizer, [ProgressBar(console)])
    assert "0/7" in out.getvalue()
    assert "━" in out.getvalue()
    assert len(re.findall(r"epoch \d/2  loss", out.getvalue())) == 2
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") > 0


def test_an_error_leaves_a_usable_terminal(dropout_state, optimizer, array_data):
    class Broken:
        def on_step_end(self, state, metrics):
            raise LookupError

    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with pytest.raises(LookupError):
        train(dropout_state, array_data, optimizer, [ProgressBar(console), Broken()])
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") > 0


def test_bad_console():
    with pytest.raises(TypeError, match="console"):
        ProgressBar("stdout")  # ty: ignore[invalid-argument-type]
