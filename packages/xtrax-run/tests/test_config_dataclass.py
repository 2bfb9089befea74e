"""TOML to dataclasses, and overrides: values are kept as they are or refused, all faults at once."""

import copy
import datetime
import decimal
import enum
import re
import typing
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypedDict, TypeVar

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
        ({"size": "aut"}, "size: must be an integer or 'auto', found the string 'aut'"),
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


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Kind(enum.StrEnum):
    A = "a"
    B = "b"


class Shape(str, enum.Enum):  # noqa: UP042 - as written before StrEnum
    ROUND = "round"


class Scale(float, enum.Enum):
    HALF = 0.5


def read(kind, value):
    """`value` as the field of type `kind`."""
    return structure_dataclass({"a": value}, make_dataclass("C", [("a", kind)]), MyError).a


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (float, 2**53, 9007199254740992.0),
        (float, 10**22, 1e22),
        (Level, 2, Level.HIGH),
        (Kind, "b", Kind.B),
        (Shape, "round", Shape.ROUND),
        (Scale, 0.5, Scale.HALF),
        (list[Level], [1, 2], [Level.LOW, Level.HIGH]),
        (Level | None, 1, Level.LOW),
        (dict[int, str], {"0": "x", "-3": "y", "12": "z"}, {0: "x", -3: "y", 12: "z"}),
        (dict[int, str], {3: "x"}, {3: "x"}),
        (dict[Kind, int], {"a": 1}, {Kind.A: 1}),
        (dict[Literal["x", "y"], int], {"y": 1}, {"y": 1}),
        (dict[Path, int], {"b/": 1}, {Path("b"): 1}),
        (dict[NewType("Epoch", int), int], {"3": 1}, {3: 1}),
        (dict[Any, int], {"3": 1}, {"3": 1}),
        (set[int], [1, 2], {1, 2}),
        (Sequence[str], ["ab"], ("ab",)),
        (NewType("Steps", int), 3, 3),
        (Annotated[list[int], "unit: s"], [3], [3]),
        (tuple[()], [], ()),
        (tuple, [1, "x"], (1, "x")),
    ],
)
def test_values_and_keys_become_what_the_field_says(kind, value, expected):
    found = read(kind, value)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(found, dict):
        assert list(map(type, found)) == list(map(type, expected))


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (float, 2**53 + 1, "a: must be a number that a float can hold exactly, found the integer 9007199254740993; the "
                           "nearest is 9007199254740992.0"),
        pytest.param(float, 16**6000, "a: must be a number that a float can hold, found an integer of 24001 bits",
                     id="long"),
        (float | str, 2**53 + 1, "a: must be a number that a float can hold exactly, found the integer "
                                 "9007199254740993; the nearest is 9007199254740992.0"),
        pytest.param(str, 16**6000, "a: must be a string, found an integer of 24001 bits", id="long string"),
        (Level, 3, "a: must be one of 1, 2, found the integer 3"),
        (Level, True, "a: must be one of 1, 2, found the boolean true"),
        (Kind, "A", "a: must be one of 'a', 'b', found the string 'A'; did you mean a?"),
        (dict[int, int], {"x": 2}, "a.x: the key must be an integer, found the string 'x'"),
        (dict[int, int], {"1": 1, "01": 2}, "a.01: the key must be an integer, found the string '01'"),
        (dict[str, int], {1: 2}, "a[1]: the key must be a string, found the integer 1"),
        (dict[Literal["x", "y"], int], {"zz": 2}, "a.zz: the key must be one of 'x', 'y', found the string 'zz'"),
        (dict[Kind, int], {"c": 2}, "a.c: the key must be one of 'a', 'b', found the string 'c'"),
        (dict[Path, int], {"b/": 1, "b": 2}, "a.b: the key is the same as 'b/'; keep one of them"),
        (set[int], [1, 2, 1], "a: must be an array without repetition, found the integer 1 more than once"),
        (frozenset[str], "abc", "a: must be an array, found the string 'abc'"),
        (Sequence[str], "abc", "a: must be an array, found the string 'abc'"),
        (tuple[()], [1], "a: must be an array of 0, found an array of 1"),
    ],
)  # fmt: skip
def test_what_a_field_cannot_hold_is_refused_not_changed(kind, value, message):
    with pytest.raises(MyError) as caught:
        read(kind, value)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (typing.Optional[int], "an integer"),  # noqa: UP045
        (int | Literal["auto"], "an integer or 'auto'"),
        (Literal["x", "y"], "one of 'x', 'y'"),
        (Level, "one of 1, 2"),
        (Annotated[int, "unit: s"], "an integer"),
        (Any, "any value"),
        (list[int], "an array"),
    ],
)
def test_a_missing_key_is_told_in_words(kind, words):
    with pytest.raises(MyError) as caught:
        structure_dataclass({}, make_dataclass("C", [("a", kind)]), MyError)
    assert str(caught.value) == f"a: missing; set it to {words}"


T = TypeVar("T")


class Point(NamedTuple):
    x: int


class Table(TypedDict):
    x: int


@dataclass
class Box(Generic[T]):
    value: T


class Secret(enum.Enum):
    A = object()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (object, "C.a: object cannot be read from TOML"),
        (complex, "C.a: complex cannot be read from TOML"),
        (bytes, "C.a: bytes cannot be read from TOML"),
        (decimal.Decimal, "C.a: Decimal cannot be read from TOML"),
        (uuid.UUID, "C.a: UUID cannot be read from TOML"),
        (Callable, "C.a: Callable cannot be read from TOML"),
        (Callable[[int], str], "C.a: collections.abc.Callable[[int], str] cannot be read from TOML"),
        (Iterable[int], "C.a: collections.abc.Iterable[int] cannot be read from TOML"),
        (OrderedDict, "C.a: OrderedDict cannot be read from TOML"),
        (Point, "C.a: Point cannot be read from TOML"),
        (Table, "C.a: Table cannot be read from TOML; make it a dataclass"),
        (Secret, "C.a: Secret cannot be read from TOML, which has no such values"),
        (Literal[Level.LOW], "C.a: typing.Literal[<Level.LOW: 1>] cannot be read from TOML, which has no such values"),
        (Box[int], "Box[int] cannot be read from TOML; make a dataclass with its types filled in"),
        (Box, "Box.value: ~T cannot be read from TOML"),
        (InitVar[int], "C.a: dataclasses.InitVar[int] cannot be read from TOML; make it a field"),
        ([int], "C.a: [<class 'int'>] cannot be read from TOML"),
        (None, "C.a: None cannot be read from TOML"),
        (list[bytes], "C.a: bytes in list[bytes] cannot be read from TOML"),
        (dict[str, int | Table], "C.a: Table in dict[str, "),
        (
            Annotated[complex, "unit: s"],
            "C.a: complex in typing.Annotated[complex, 'unit: s'] cannot be read from TOML",
        ),
        (
            dict[float, int],
            "C.a: float in dict[float, int] cannot be read from TOML, whose keys are strings; a table's",
        ),
        (dict[Level, int], "whose keys are strings; a table's keys may be str, int, Path, or a Literal or Enum of str"),
        ("Nowhere", "the annotations of C cannot be resolved: name 'Nowhere' is not defined"),
    ],
)
def test_a_field_that_no_document_can_set_is_refused_with_the_class(kind, message):
    cls = make_dataclass("C", [("a", kind, field(default=None)), ("other", int, 0)])
    for raw in ({}, {"a": {"x": 1}}):
        with pytest.raises(TypeError, match=re.escape(message)):
            structure_dataclass(raw, cls, MyError)
    if isinstance(kind, type) and not typing.get_args(kind):
        outer = make_dataclass("Outer", [("inner", list[cls], field(default_factory=list))])
        with pytest.raises(TypeError, match=re.escape(message)):
            structure_dataclass({}, outer, MyError)


def test_every_such_field_is_told_and_what_is_not_read_is_not():
    @dataclass
    class C:
        a: bytes
        b: complex = 0j
        made: object = field(default=None, init=False)
        constant: typing.ClassVar[bytes] = b""

    with pytest.raises(TypeError) as caught:
        structure_dataclass({}, C, MyError)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0].rpartition(".")[2] for line in lines[:2]] == ["a", "b"]
    assert lines[2].startswith("a field may be bool, int, float, str, ")
    assert len(lines) == 3


@dataclass
class Node:
    a: int
    children: "list[Node]" = field(default_factory=list)


def test_dataclasses_may_hold_one_another():
    assert structure_dataclass({"a": 1, "children": [{"a": 2}]}, Node, MyError) == Node(1, [Node(2)])
    with pytest.raises(MyError, match=re.escape("children[0].a: must be an integer, found the string 'x'")):
        structure_dataclass({"a": 1, "children": [{"a": "x"}]}, Node, MyError)


def test_keys_that_are_no_strings_and_depth_are_faults_of_the_document(tmp_path):
    with pytest.raises(MyError, match="the key 3 must be a string"):
        structure_dataclass({"a": 1, 3: 4}, Node, MyError)
    path = tmp_path / "c.toml"
    path.write_text(f"a{'.a' * 5000} = 1\n")
    with pytest.raises(MyError, match=re.escape(f"{path}: arrays or tables are nested too deeply")):
        load_dataclass(path, Node, MyError)


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s=None", "None is not TOML; TOML has no None: leave the key out, here and in the file"),
        ("s=null", "null is not TOML; TOML has no None: leave the key out, here and in the file"),
        ("s=True", "True is not TOML; write true"),
        ("empty.0=1", "empty is an empty array; set the whole array"),
        ("s=" + "1" * 5000, "the value has an integer of more digits than Python reads"),
        ("s=" + "[" * 5000, "arrays or tables are nested too deeply to be read; flatten them"),
    ],
)
def test_a_faulty_override_says_what_to_do(text, message):
    with pytest.raises(MyError) as caught:
        apply_overrides({"empty": []}, [text], MyError)
    assert f": {message}" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_element_of_a_default_cannot_be_overridden():
    cls = make_dataclass("C", [("layers", list[int], field(default_factory=lambda: [1]))])
    with pytest.raises(MyError) as caught:
        structure_dataclass(apply_overrides({}, ["layers.0=1"], MyError), cls, MyError)
    assert str(caught.value) == (
        "layers: must be an array, found a table; elements are overridden one by one only in an array that the file "
        "has: set the whole array, as in key=[1, 2]"
    )


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
