"""Reading TOML: positions of faults and keys, and small checks by hand."""

import datetime
import os
import re
import subprocess
import sys
import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.config import (
    SchemaVersionStatus,
    check_schema_version,
    classify_schema_version,
    dump_toml,
    load_toml_document,
    require_field,
    require_sections,
)
from xtrax.config._keys import format_key, key_lines, split_key


class MyError(Exception):
    pass


def write(folder, text, name="run.toml"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_importing_config_and_run_imports_no_jax():
    code = "import sys, xtrax.config, xtrax.run; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_document_is_plain_values_and_knows_its_lines(tmp_path):
    path = write(tmp_path, 'a = 1\n\n[b."c d"] # comment = 3\ne.f = "x"\n[[g]]\n[[g]]\nh = [1,\n  {i = 2}]\n')
    document = load_toml_document(path, MyError)
    assert document == {"a": 1, "b": {"c d": {"e": {"f": "x"}}}, "g": [{}, {"h": [1, {"i": 2}]}]}
    assert type(document["b"]) is dict
    where = {key: document.where(key).removeprefix(f"{path}") for key in document.origins}
    assert where[("a",)] == ":1"
    assert where[("b",)] == where[("b", "c d")] == ":3"
    assert where[("b", "c d", "e", "f")] == ":4"
    assert where[("g", 0)] == ":5"
    assert where[("g", 1)] == ":6"
    assert where[("g", 1, "h")] == ":7"
    assert where[("g", 1, "h", 1, "i")] == ":8"
    assert document.where(("b", "c d", "missing")) == f"{path}:3"
    assert document.where(("nowhere",)) == str(path)


def test_crlf_bom_and_multiline_strings_do_not_move_lines(tmp_path):
    text = (
        b'\xef\xbb\xbfa = """\r\n[not.a.table]\r\nb = 1"""\r\n'
        b"c = '''\nd = \"\"\"\n'''\r\n"
        b'e = "\\"[f]\\""\r\ng = """x"""""\r\nh = 1\r\n'
    )
    document = load_toml_document(write(tmp_path, text), MyError)
    assert {key: document.origins[key] for key in document.origins} == {
        ("a",): 1,
        ("c",): 4,
        ("e",): 7,
        ("g",): 8,
        ("h",): 9,
    }
    assert document["g"] == 'x""'


@pytest.mark.parametrize(
    ("text", "line", "column"),
    [
        ("a = 1\nb = = 2\n", 2, 5),
        ("a = 1\na = 2\n", 2, 6),
        ("[a\n", 1, 3),
        ("x = [1, 2", 1, 10),
        ("a = 1\nb = 'x", 2, 7),
        ("a = 1\n\nb", 3, 2),
    ],
)
def test_a_syntax_error_has_file_line_and_column(tmp_path, text, line, column):
    path = write(tmp_path, text)
    with pytest.raises(MyError, match=re.escape(f"{path}:{line}:{column}: not valid TOML: ")) as caught:
        load_toml_document(path, MyError)
    assert "\n" not in str(caught.value)
    assert "end of document" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = 1\na = 2\n", "2:6: not valid TOML: the key a is set twice; keep one"),
        ("[t]\nx.y = 1\nb = 0\nx.y = [\n  1,\n]\n", "6:2: not valid TOML: the key x.y is set twice; keep one"),
        ('a = 1\na = """\nb = 3\n"""\n', "4:4: not valid TOML: the key a is set twice; keep one"),
        ("a = 1\r\na = 2", "2:6: not valid TOML: the key a is set twice; keep one at the end of the file"),
        ("[m.x]\n[m.x]\n", "the table m.x stands twice; join them"),
        ("m = {a = 1, a = 2}\n", "Duplicate inline table key 'a'"),
    ],
)
def test_a_key_or_table_that_stands_twice_is_named(tmp_path, text, words):
    with pytest.raises(MyError, match=re.escape(words)):
        load_toml_document(write(tmp_path, text), MyError)


def test_a_file_that_is_not_utf8_says_where(tmp_path):
    path = write(tmp_path, b"a = 1\nb = '\xff'\n")
    with pytest.raises(MyError, match=re.escape(f"{path}:2:6: not UTF-8 (byte 0xff)")):
        load_toml_document(path, MyError)


def test_a_missing_file_names_a_near_one(tmp_path):
    write(tmp_path, "", "train.toml")
    with pytest.raises(MyError, match=r"trian\.toml: no such file; did you mean .*train\.toml\?"):
        load_toml_document(tmp_path / "trian.toml", MyError)
    with pytest.raises(MyError, match=r"zzz: no such file; that folder has train\.toml"):
        load_toml_document(tmp_path / "zzz", MyError)
    with pytest.raises(MyError, match=r"the folder .*nowhere does not exist either"):
        load_toml_document(tmp_path / "nowhere" / "x.toml", MyError)


def test_a_folder_an_unreadable_file_and_a_wrong_name(tmp_path):
    with pytest.raises(MyError, match="is a folder"):
        load_toml_document(tmp_path, MyError)
    with pytest.raises(MyError, match="cannot be the name of a file"):
        load_toml_document("a\0b", MyError)
    if os.geteuid():
        path = write(tmp_path, "")
        path.chmod(0)
        with pytest.raises(MyError, match="cannot be read: Permission denied"):
            load_toml_document(path, MyError)


def test_too_deep_a_nesting_is_a_fault_of_the_file(tmp_path):
    path = write(tmp_path, "a = " + "[" * 100_000 + "]" * 100_000)
    with pytest.raises(MyError, match=re.escape(str(path))):
        load_toml_document(path, MyError)


@pytest.mark.parametrize("error_cls", [None, "ValueError", ValueError("x"), int])
def test_an_error_class_that_is_none_is_refused(tmp_path, error_cls):
    with pytest.raises(TypeError, match="error_cls must be an exception class"):
        load_toml_document(write(tmp_path, ""), error_cls)
    with pytest.raises(TypeError, match="path must be a str or a path, got int"):
        load_toml_document(3, MyError)


names = st.one_of(
    st.from_regex(r"[A-Za-z0-9_-]{1,3}", fullmatch=True), st.text("ab.\"'#=[]{} é\\\t", min_size=1, max_size=3)
)
scalars = st.sampled_from(
    ["1", "-2.5e3", "true", "1979-05-27 07:32:00", "'#]}'", '"\\"}=,"', '"""\nx = 1\n[y]"""', "inf"]
)
inline = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: "[\n" + ", # ]\n".join(items) + "\n]"),
        st.dictionaries(names.filter(str.isalnum), inner, max_size=2).map(
            lambda table: "{ " + ", ".join(f"{key} = {value}" for key, value in table.items()) + " }"
        ),
    ),
    max_leaves=6,
)
statements = st.lists(st.tuples(st.sampled_from("ptta"), st.lists(names, min_size=1, max_size=3), inline), max_size=8)


def paths(value, key=()):
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for step, child in children:
        yield (*key, step)
        yield from paths(child, (*key, step))


@settings(max_examples=150, deadline=None)
@given(statements)
def test_every_key_of_any_document_has_the_line_it_is_written_on(parts):
    text = ""
    for kind, parts_of_key, value in parts:
        name = ".".join(format_key((part,)) for part in parts_of_key)
        line = {"p": f"{name} = {value}\n", "t": f"[{name}]\n", "a": f"\n[[ {name} ]] # x\n"}[kind]
        try:
            tomllib.loads(text + line)
        except (tomllib.TOMLDecodeError, RecursionError):
            continue
        text += line
    lines = key_lines(text)
    assert set(lines) == set(paths(tomllib.loads(text)))
    written = text.split("\n")
    for key, line in lines.items():
        if isinstance(key[-1], str):
            assert format_key((key[-1],)) in written[line - 1]


@given(st.lists(names, min_size=1, max_size=4))
def test_a_formatted_key_is_split_into_the_same_parts(parts):
    assert split_key(format_key(tuple(parts))) == tuple(parts)


@pytest.mark.parametrize("text", ["", ".", "a.", ".a", "a b", "a = 1", "a[0]", '"a', "é"])
def test_what_is_no_dotted_key_is_refused(text):
    with pytest.raises(ValueError, match=r"dotted key|not valid TOML"):
        split_key(text)


def test_every_missing_section_is_named_with_the_nearest(tmp_path):
    document = load_toml_document(write(tmp_path, "loss = 3\n[modle]\n[optimizer.kwargs]\n"), MyError)
    require_sections(document, ["optimizer", "optimizer.kwargs"], MyError)
    with pytest.raises(MyError) as caught:
        require_sections(document, ["model", "loss", "data", "optimizer"], MyError)
    assert str(caught.value).splitlines() == [
        f"{document.path}: model: this section is missing; did you mean it by modle?",
        f"{document.path}:1: loss: must be a table ([loss]), found the integer 3",
        f"{document.path}: data: this section is missing; add a [data] table",
    ]


@pytest.mark.parametrize(
    ("raw", "sections", "message"),
    [
        ([], ["a"], "raw must be the dict of a TOML document, got list"),
        ({}, "model", "sections must be a list of names"),
        ({}, 3, "sections must be a list of names"),
        ({}, [3], "sections must name fields by strings"),
    ],
)
def test_require_sections_refuses_arguments_of_the_wrong_kind(raw, sections, message):
    with pytest.raises(TypeError, match=message):
        require_sections(raw, sections, MyError)


def is_positive(value):
    """a number above 0"""
    return value > 0


def test_require_field_returns_the_value_or_tells_what_is_wrong(tmp_path):
    document = load_toml_document(write(tmp_path, "[o.kwargs]\nlr = -1\nx = 0\n'a.b' = 2\n"), MyError)
    assert require_field(document, "o.kwargs.lr", lambda value: value < 0, MyError) == -1
    assert require_field(document, "o.kwargs.x", lambda value: value == 0, MyError) == 0  # falsy, and there
    assert require_field(document, "o.kwargs.'a.b'", is_positive, MyError) == 2
    assert require_field(document["o"]["kwargs"], "a.b", is_positive, MyError) == 2
    with pytest.raises(MyError, match=r"run\.toml:2: o\.kwargs\.lr: must be a number above 0, found the integer -1$"):
        require_field(document, "o.kwargs.lr", is_positive, MyError)
    with pytest.raises(MyError, match=r"run\.toml:1: o\.kwargs\.lx: missing; did you mean it by x\?|lr\?"):
        require_field(document, "o.kwargs.lx", is_positive, MyError)
    with pytest.raises(MyError, match=r"o\.nothing\.lr: missing; set it"):
        require_field(document, "o.nothing.lr", is_positive, MyError)
    with pytest.raises(MyError, match=r"^name: must be a number above 0, found the string 'x'$"):
        require_field({"name": "x"}, "name", is_positive, MyError)
    with pytest.raises(MyError, match=r"^name: this value is not allowed, found an empty array$"):
        require_field({"name": []}, "name", lambda value: False, MyError)


@pytest.mark.parametrize("predicate", [str, None, "x"])
def test_a_type_is_not_a_predicate(predicate):
    with pytest.raises(TypeError, match="predicate must be a function"):
        require_field({"name": 3}, "name", predicate, MyError)


def test_a_predicate_of_ones_own_that_is_broken_is_not_hidden():
    def broken(value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        require_field({"name": 3}, "name", broken, MyError)


@pytest.mark.parametrize(
    ("raw", "kind", "found"),
    [
        ({"schema_version": 2}, "ok", 2),
        ({}, "missing", None),
        ({"schema_version": 1}, "mismatched", 1),
        ({"schema_version": 0}, "mismatched", 0),
        ({"schema_version": True}, "mismatched", True),
        ({"schema_version": "2"}, "mismatched", "2"),
        ({"schema_version": 2.0}, "mismatched", 2.0),
        ({"schema_version": 3}, "newer_than_supported", 3),
    ],
)
def test_schema_versions_are_told_apart(raw, kind, found):
    assert classify_schema_version(raw, 2) == SchemaVersionStatus(kind, found, 2)
    if kind == "ok":
        check_schema_version(raw, 2, MyError)
    else:
        word = {"missing": "missing; write schema_version = 2", "mismatched": "must be the integer 2, found the "}
        with pytest.raises(MyError, match=word.get(kind, "3 is newer than 2")):
            check_schema_version(raw, 2, MyError)


def test_a_schema_fault_has_its_line(tmp_path):
    document = load_toml_document(write(tmp_path, "\nschema_version = 9\n"), MyError)
    with pytest.raises(MyError, match=r"run\.toml:2: schema_version: 9 is newer than 1"):
        check_schema_version(document, 1, MyError)


@pytest.mark.parametrize("current", [True, 1.0, "1", None])
def test_a_current_version_of_the_wrong_kind_is_refused(current):
    with pytest.raises(TypeError, match="current must be an integer"):
        classify_schema_version({}, current)
    with pytest.raises(ValueError, match="current must be at least 1, got 0"):
        classify_schema_version({}, 0)
    with pytest.raises(TypeError, match="raw must be the dict"):
        classify_schema_version(None, 1)


values = st.recursive(
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
        st.datetimes(timezones=st.sampled_from([None, datetime.UTC])),
        st.dates(),
        st.times(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(names, inner, max_size=3)),
    max_leaves=10,
)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(names, values, max_size=4))
def test_what_is_dumped_is_read_back(document):
    assert tomllib.loads(dump_toml(document)) == document


@pytest.mark.parametrize("raw", [{"a": None}, {"a": [object()]}, {"a": {1: 2}}, {"a": b"x"}, []])
def test_what_toml_cannot_hold_is_refused(raw):
    with pytest.raises(TypeError):
        dump_toml(raw)


def test_an_integer_of_more_digits_than_python_reads_is_told_with_its_line_and_key(tmp_path):
    ones, limit = "1" * 5000, sys.get_int_max_str_digits()
    path = tmp_path / "c.toml"
    path.write_text(
        f"# {ones}\ntext = '''\nx = {ones}'''\nlarge = {ones}.5\nhex = 0x{ones}\n"
        f"[a.b]\nx = [1,\n  {{y = -{ones}}}]\n[[c]]\nz = 1_{ones}\n"
    )
    with pytest.raises(MyError) as caught:
        load_toml_document(path, MyError)
    assert str(caught.value).splitlines() == [
        f"{path}:8: a.b.x[1].y: an integer of 5000 digits is too long; Python reads at most {limit}",
        f"{path}:10: c[0].z: an integer of 5001 digits is too long; Python reads at most {limit}",
    ]
    path.write_text(f"a = {ones}\nb = = 2\n")
    with pytest.raises(MyError, match=re.escape(f"{path}:2:5: not valid TOML")):
        load_toml_document(path, MyError)
