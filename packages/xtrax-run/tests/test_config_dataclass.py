"""TOML to dataclasses, and overrides: values are kept as they are or refused, all faults at once."""

import copy
import datetime
import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.config import apply_overrides, load_dataclass, load_toml_document, structure_dataclass


class MyError(Exception):
    pass


def positive(value):
    if value <= 0:
        raise ValueError(f"must be above 0, found {value}")


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True)
class Optimizer:
    path: str
    lr: float = field(default=1e-3, metadata={"check": positive})
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Config:
    steps: int = field(metadata={"check": positive})
    optimizer: Optimizer
    name: str | None = None
    shape: tuple[int, ...] = ()
    pair: tuple[int, str] = (0, "")
    layers: list[Optimizer] = field(default_factory=list)
    by_name: dict[str, Optimizer] = field(default_factory=dict)
    table: Mapping[str, int] = field(default_factory=dict)
    where: Path = Path()
    when: datetime.date | None = None
    mode: Literal["fast", "slow", 3] = "fast"
    colour: Colour = Colour.RED
    size: int | Literal["auto"] = "auto"
    flag: bool = False
    either: float | str = 0.0
    anything: Any = None
    tagged: Annotated[int, "unit: s"] = 0

    def __post_init__(self):
        if self.flag and self.name is None:
            raise ValueError("flag needs a name")


MINIMAL = {"steps": 3, "optimizer": {"path": "optax:adam"}}


def test_everything_is_read_as_what_the_fields_say(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(
        """
steps = 10
name = "n"
shape = [1, 2]
pair = [1, "a"]
where = "data/x"
when = 2024-01-02
mode = 3
colour = "blue"
size = 4
flag = true
either = 2
anything = [1, {a = 2}]
tagged = 5
table = {a = 1}
[optimizer]
path = "optax:adam"
lr = 1
kwargs = {b1 = 0.9, nested = {x = [1]}}
[[layers]]
path = "a:b"
[by_name.first]
path = "c:d"
"""
    )
    assert load_dataclass(path, Config, MyError) == Config(
        steps=10,
        optimizer=Optimizer("optax:adam", 1.0, {"b1": 0.9, "nested": {"x": [1]}}),
        name="n",
        shape=(1, 2),
        pair=(1, "a"),
        layers=[Optimizer("a:b")],
        by_name={"first": Optimizer("c:d")},
        table={"a": 1},
        where=Path("data/x"),
        when=datetime.date(2024, 1, 2),
        mode=3,
        colour=Colour.BLUE,
        size=4,
        flag=True,
        either=2.0,
        anything=[1, {"a": 2}],
        tagged=5,
    )
    assert type(load_dataclass(path, Config, MyError).optimizer.lr) is float


def test_defaults_fill_what_is_left_out():
    config = structure_dataclass(MINIMAL, Config, MyError)
    assert config == Config(3, Optimizer("optax:adam"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": "3"}, "steps: must be an integer, found the string '3'"),
        ({"steps": True}, "steps: must be an integer, found the boolean true"),
        ({"steps": 3.0}, "steps: must be an integer, found the float 3.0"),
        ({"steps": 0}, "steps: must be above 0, found 0"),
        ({"steps": -2}, "steps: must be above 0, found -2"),
        ({"flag": 1, "name": "n"}, "flag: must be a boolean (true or false), found the integer 1"),
        ({"flag": True}, "flag needs a name"),
        ({"name": 3}, "name: must be a string, found the integer 3"),
        ({"shape": "12"}, "shape: must be an array, found the string '12'"),
        ({"shape": [1, "x"]}, "shape[1]: must be an integer, found the string 'x'"),
        ({"pair": [1]}, "pair: must be an array of 2, found an array of 1"),
        ({"pair": [1, 2]}, "pair[1]: must be a string, found the integer 2"),
        ({"optimizer": 3}, "optimizer: must be a table, found the integer 3"),
        ({"optimizer": []}, "optimizer: must be a table, found an empty array"),
        ({"optimizer": {"path": "p", "lr": True}}, "optimizer.lr: must be a number, found the boolean true"),
        ({"optimizer": {"path": "p", "lr": -1.0}}, "optimizer.lr: must be above 0, found -1.0"),
        ({"optimizer": {"path": "p", "kwargs": 2}}, "optimizer.kwargs: must be a table, found the integer 2"),
        ({"optimizer": {}}, "optimizer.path: missing; set it to a string"),
        ({"layers": [{"path": "p"}, {}]}, "layers[1].path: missing; set it to a string"),
        ({"layers": {"path": "p"}}, "layers: must be an array, found a table"),
        ({"by_name": {"a b": {"path": 1}}}, 'by_name."a b".path: must be a string, found the integer 1'),
        ({"table": {"x": "y"}}, "table.x: must be an integer, found the string 'y'"),
        ({"where": 3}, "where: must be a path, as a string, found the integer 3"),
        ({"when": datetime.datetime(2024, 1, 2)}, "when: must be a date, found the date or time 2024-01-02 00:00:00"),
        ({"mode": "fsat"}, "mode: must be one of 'fast', 'slow', 3, found the string 'fsat'; did you mean fast?"),
        ({"mode": 3.0}, "mode: must be one of 'fast', 'slow', 3, found the float 3.0"),
        ({"colour": "Red"}, "colour: must be one of 'red', 'blue', found the string 'Red'; did you mean red?"),
        ({"size": "aut"}, "size: must be an integer or typing.Literal['auto'], found the string 'aut'"),
        ({"either": []}, "either: must be a number or a string, found an empty array"),
        ({"tagged": "x"}, "tagged: must be an integer, found the string 'x'"),
        ({"nmae": "x"}, "nmae: unknown key; did you mean name?"),
        ({"optimizer": {"path": "p", "LR": 1}}, "optimizer.LR: unknown key; did you mean lr?"),
        ({"optimizer": {"pth": "p"}}, "optimizer.pth: unknown key; did you mean path?"),
        ({"optimizer": {"path": "p", "zzz": 1}}, "optimizer.zzz: unknown key; allowed: kwargs, lr, path"),
    ],
)
def test_a_wrong_value_is_told_by_key_with_what_was_found_and_what_is_allowed(change, message):
    with pytest.raises(MyError) as caught:
        structure_dataclass({**MINIMAL, **change}, Config, MyError)
    assert str(caught.value) == message


def test_all_faults_are_told_at_once_with_their_lines(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("stpes = 1\nflag = 2\n[optimizer]\nlr = 'x'\n\n[[layers]]\nlr = -1\nbogus = 1\n")
    with pytest.raises(MyError) as caught:
        load_dataclass(path, Config, MyError)
    assert sorted(str(caught.value).splitlines()) == sorted(
        [
            f"{path}:1: stpes: unknown key; did you mean steps?",
            f"{path}:2: flag: must be a boolean (true or false), found the integer 2",
            f"{path}:4: optimizer.lr: must be a number, found the string 'x'",
            f"{path}:3: optimizer.path: missing; set it to a string",
            f"{path}:7: layers[0].lr: must be above 0, found -1.0",
            f"{path}:6: layers[0].path: missing; set it to a string",
            f"{path}:8: layers[0].bogus: unknown key; allowed: kwargs, lr, path",
        ]
    )


@pytest.mark.parametrize("cls", [int, Config(3, Optimizer("p")), None, "Config"])
def test_what_is_no_dataclass_is_refused(cls):
    with pytest.raises(TypeError, match="cls must be a dataclass"):
        structure_dataclass({}, cls, MyError)
    with pytest.raises(TypeError, match="error_cls must be an exception class"):
        structure_dataclass(MINIMAL, Config, None)
    with pytest.raises(TypeError, match="raw must be the dict"):
        structure_dataclass([], Config, MyError)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("optimizer.lr=1e-3", 1e-3),
        ("optimizer.lr = 3", 3),
        ("optimizer.lr=true", True),
        ("optimizer.lr=[1, 2]", [1, 2]),
        ("optimizer.lr={a = 1}", {"a": 1}),
        ("optimizer.lr='a b'", "a b"),
        ("optimizer.lr=net.layers:make", "net.layers:make"),
        ("optimizer.lr=../data/x.npz", "../data/x.npz"),
        ("optimizer.lr=a=b", None),
        ("optimizer.lr=1e-3x", None),
        ("optimizer.lr=", None),
        ("optimizer.lr=True", None),
        ("optimizer.lr=None", None),
        ("optimizer.lr=1\nsteps = 2", None),
        ("=3", None),
        ("optimizer.lr", None),
        ("optimizer..lr=3", None),
        ("steps.x=3", None),
        ("layers.5.lr=3", None),
        ("layers.first.lr=3", None),
    ],
)
def test_an_override_is_one_toml_value_or_a_plain_name(text, value):
    raw = {"steps": 1, "optimizer": {"lr": 0.5}, "layers": [{"lr": 1}]}
    before = copy.deepcopy(raw)
    if value is None:
        with pytest.raises(MyError, match=re.escape(f"override {text!r}: ")):
            apply_overrides(raw, [text], MyError)
    else:
        changed = apply_overrides(raw, [text], MyError)
        assert changed["optimizer"]["lr"] == value
        assert type(changed["optimizer"]["lr"]) is type(value)
    assert raw == before


def test_overrides_reach_into_arrays_and_make_tables():
    raw = {"layers": [{"lr": 1}, {"lr": 2}]}
    changed = apply_overrides(raw, ["layers.1.lr=5", "new.table.x=1", "new.table.x=2"], MyError)
    assert changed == {"layers": [{"lr": 1}, {"lr": 5}], "new": {"table": {"x": 2}}}


def test_a_fault_of_an_override_is_told_from_a_line_of_the_file(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("steps = 1\n[optimizer]\npath = 'p'\nlr = 1\n")
    with pytest.raises(MyError) as caught:
        load_dataclass(path, Config, MyError, overrides=["optimizer.lr=x", "optimiser.lr=3", "flag=2"])
    assert sorted(str(caught.value).splitlines()) == sorted(
        [
            f"{path} (override): optimizer.lr: must be a number, found the string 'x'",
            f"{path} (override): optimiser: unknown key; did you mean optimizer?",
            f"{path} (override): flag: must be a boolean (true or false), found the integer 2",
        ]
    )
    document = load_toml_document(path, MyError)
    assert apply_overrides(document, ["steps=2"], MyError).where(("optimizer", "lr")) == f"{path}:4"
    assert document == {"steps": 1, "optimizer": {"path": "p", "lr": 1}}


def test_faulty_overrides_are_told_together():
    with pytest.raises(MyError) as caught:
        apply_overrides({}, ["a", "b=x y", "c=1"], MyError)
    assert len(str(caught.value).splitlines()) == 2
    with pytest.raises(TypeError, match="overrides must be a list"):
        apply_overrides({}, "a=1", MyError)
    with pytest.raises(TypeError, match="key=value texts"):
        apply_overrides({}, [3], MyError)


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.one_of(st.integers(), st.booleans(), st.floats()), max_size=5
    )
)
def test_an_override_gives_what_python_would_set(values):
    texts = [f"table.{name}={str(value).lower()}" for name, value in values.items()]
    changed = apply_overrides({"table": {}}, texts, MyError)
    assert {name: str(value) for name, value in changed["table"].items()} == {k: str(v) for k, v in values.items()}
