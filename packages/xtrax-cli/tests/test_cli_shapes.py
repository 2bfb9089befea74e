"""The shape grammar: what is written is what is read, and a fault is shown where it stands."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrax.cli import CLIError, ShapeParseError
from xtrax.cli._shapes import DTYPES, Shape, parse_shapes

names = st.from_regex(r"[a-z_][a-z0-9_]{0,4}", fullmatch=True)
leaves = st.builds(
    Shape, st.lists(st.integers(0, 2**40), max_size=4).map(tuple), st.sampled_from(list(DTYPES.values()))
)
trees = st.recursive(leaves, lambda inner: st.dictionaries(names, inner, min_size=1, max_size=3), max_leaves=6)
blanks = st.text(" \t\n", min_size=1, max_size=3)


def written(tree, prefix=""):
    """The entries of a tree, one by one."""
    short = {full: name for name, full in DTYPES.items()}
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from written(value, f"{prefix}{name}.")
        else:
            comma = "," if len(value.shape) == 1 else ""
            yield f"{prefix}{name}=({','.join(map(str, value.shape))}{comma}){short[value.dtype]}"


@settings(max_examples=50)
@given(st.dictionaries(names, trees, min_size=1, max_size=3), blanks)
def test_what_is_written_is_what_is_read(tree, blank):
    text = blank.join(written(tree))
    assert parse_shapes(text) == tree
    assert parse_shapes(blank + text + blank) == tree


def test_blanks_and_a_last_comma_inside_the_parentheses():
    assert parse_shapes("x=( 4 , 3, )f32") == {"x": Shape((4, 3), "float32")}
    assert parse_shapes("x=()f32") == {"x": Shape((), "float32")}


@pytest.mark.parametrize(
    ("text", "at", "what"),
    [
        ("", 0, "there is no entry"),
        ("   ", 3, "there is no entry"),
        ("x", 1, "'=' after the name 'x' must stand here, found the end"),
        ("x (3)f32", 1, "'=' after the name 'x' must stand here, found ' '"),
        ("x=3f32", 2, "'(' of the shape of 'x' must stand here, found '3'"),
        ("x=(4,-3)f32", 5, "a size of at least 0 or ')' must stand here, found '-'"),
        ("x=(4.5)f32", 4, "',' or ')' must stand here, found '.'"),
        ("x=(4,3", 6, "',' or ')' must stand here, found the end"),
        ("x=(4,,3)f32", 5, "found ','"),
        ("x=(,)f32", 3, "found ','"),
        ("x=(n,3)f32", 3, "found 'n'"),
        ("x=(４)f32", 3, "found '４'"),
        (f"x=({2**63})f32", 3, f"a size must be at most {2**63 - 1}"),
        ("x=(" + "9" * 60 + ")f32", 3, "a size must be at most"),
        ("x=(4,3)", 7, "a dtype must stand here"),
        ("x=(4,3) f32", 7, "a dtype must stand here"),
        ("x=(4,3)f33", 7, "there is no dtype 'f33'; did you mean f32?"),
        ("x=(4,3)float32", 7, "there is no dtype 'float32'; did you mean f32?"),
        ("x=(4,3)zzz", 7, "there is no dtype 'zzz'"),
        ("x=(4,3)f32,y=(3)f32", 10, "a blank or the end must stand here, found ','"),
        ("x=(3)f32 x=(4)f32", 9, "'x' has a shape already; give each name once"),
        ("b.x=(3)f32 b=(4)f32", 11, "'b' has entries in it already"),
        ("b=(3)f32 b.c.x=(4)f32", 9, "'b' has a shape already, so it cannot hold 'b.c.x'"),
        ("3x=(3)f32", 0, "a name must stand here, found '3'"),
        ("b..x=(3)f32", 1, "'=' after the name 'b' must stand here, found '.'"),
        ("a=(1)f32 =(3)f32", 9, "a name must stand here, found '='"),
    ],
)
def test_a_fault_is_shown_by_a_caret_with_the_grammar(text, at, what):
    with pytest.raises(ShapeParseError) as caught:
        parse_shapes(text)
    first, shown, caret, grammar, dtypes = str(caught.value).split("\n")
    assert what in first
    assert shown == f"  {text}"
    assert caret == "  " + " " * at + "^"
    assert "name=(d0,d1,...)dtype" in grammar
    assert all(f" {name}" in dtypes for name in DTYPES)
    assert isinstance(caught.value, CLIError)
    assert isinstance(caught.value, ValueError)


def test_the_caret_points_into_a_window_of_a_long_text():
    text = "\n".join(f"x{i}=(4,3)f32" for i in range(50)).replace("x25=(4,3)f32", "x25=(4,3)f?2")
    with pytest.raises(ShapeParseError) as caught:
        parse_shapes(text)
    _, shown, caret, *_ = str(caught.value).split("\n")
    assert len(shown) < 80
    assert shown[len(caret) - 1 :].startswith("f?2 x26=")


def test_the_grammar_needs_no_jax():
    import subprocess
    import sys

    code = (
        "import sys, xtrax.cli._shapes as s; s.parse_shapes('x=(3)f32'); assert not {'jax', 'numpy'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
