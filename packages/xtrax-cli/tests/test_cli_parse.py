"""The command line itself: quick, quiet, and telling the fix."""

import shlex
import subprocess
import sys
from dataclasses import dataclass

import pytest

from xtrax.cli import REGISTRY, CLIError, CLIImportError, load_fn, main


def in_fresh_process(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_importing_the_package_imports_neither_tyro_nor_jax():
    code = "import sys, xtrax.cli; print(*{'tyro', 'jax', 'rich', 'numpy', 'cattrs'} & set(sys.modules))"
    assert in_fresh_process(code).stdout == "\n"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["run", "--help"], 0),
        (["--version"], 0),
        (["--tyro-print-completion", "zsh"], 0),
        (["rnu", "x.toml"], 2),
        (["run"], 2),
        (["resume", "x", "--epochs", "many"], 2),
        (["resume", "x"], 2),
        (["plan", "--help"], 0),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f33"], 2),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--budget", "much"], 2),
        (["explain", "--fn", "a:b", "--shapes", "x=(3)f32", "--fmt", "png"], 2),
        (["export", "--fn", "a:b", "--shapes", "x=(3)f32", "--serialized"], 2),
        (["graph-author", "--out", "g.json", "--num-nodes", "0"], 2),
    ],
)
def test_help_version_completion_and_usage_errors_import_no_jax(arguments, code):
    program = f"import sys; from xtrax.cli import main; code = main({arguments})"
    done = in_fresh_process(f"{program}; assert 'jax' not in sys.modules; sys.exit(code)")
    assert done.returncode == code, done.stderr
    assert (done.stdout == "") == bool(code)
    assert (done.stderr != "") == bool(code)
    assert "\x1b[" not in done.stdout + done.stderr


@pytest.mark.parametrize("verb", REGISTRY)
def test_the_help_of_each_verb_has_an_example(verb, capsys):
    assert main([verb, "--help"]) == 0
    assert f"xtrax {verb}" in capsys.readouterr().out.split("Example", 1)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rnu", "train.toml"], ["'rnu'", "did you mean xtrax run?"]),
        (["zzzzz"], ["'zzzzz'", "there are plan, explain, export, run, resume"]),
        ([], ["name a verb", "run", "resume", "xtrax --help"]),
        (["run"], ["xtrax run needs CONFIG;", "xtrax run --help"]),
        (["plan"], ["xtrax plan needs --fn, --shapes;", "xtrax plan --help"]),
        (["plan", "--fn", "a:b"], ["xtrax plan needs --shapes;", "xtrax plan --help"]),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--batch-size", "0"], ["--batch-size must be at least 1"]),
        (
            ["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--batch-size", "2.5"],
            ["--batch-size must be an integer, found '2.5'"],
        ),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--budget", "2 apples"], ["--budget", "'2 apples'", "2GB"]),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--budget", "0"], ["--budget must be at least 1 byte"]),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--budget", "0.1B"], ["--budget must be at least 1 byte"]),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--per-element"], ["--per-element needs --axes", "x=batch"]),
        (["plan", "--fn", "a:b", "--shapes", "x=(3)f32", "--axes", "x=b"], ["say --per-element"]),
        (["explain", "--fn", "a:b", "--shapes", "x=(3)f32", "--fmt", "png"], ["--fmt png writes bytes", "--out FILE"]),
        (
            ["explain", "--fn", "a:b", "--shapes", "x=(3)f32", "--fmt", "pdf"],
            ["--fmt must be one of 'json', 'text', 'html', 'png', found 'pdf'"],
        ),
        (
            ["export", "--fn", "a:b", "--shapes", "x=(3)f32", "--serialized"],
            ["--serialized writes bytes", "--out FILE"],
        ),
        (["graph-author", "--out", "g.json", "--num-nodes", "0"], ["--num-nodes must be at least 1, found 0"]),
        (["graph-author", "--out", "g.json", "--seed", "-1"], ["--seed must be at least 0, found -1"]),
        (["graph-author"], ["xtrax graph-author needs --out;", "xtrax graph-author --help"]),
        (["graph-author", "--out", "g.json", "--num-nodes", "x"], ["--num-nodes must be an integer, found 'x'"]),
        (["resume", "x", "--epochs"], ["xtrax: --epochs needs a value; see xtrax resume --help"]),
        (["run", "a.toml", "--bogus"], ["xtrax run does not take --bogus; ", "xtrax run --help"]),
        (["run", "a.toml", "b.toml"], ["xtrax run does not take b.toml; "]),
        (["resume", "x", "--epochs", "many"], ["--epochs must be an integer, found 'many'; see xtrax resume --help"]),
        (["resume", "x"], ["--epochs N", "--in-place"]),
        (["resume", "x", "--epochs", "3", "--in-place"], ["--epochs N", "--in-place"]),
        (["resume", "x", "--epochs", "0"], ["--epochs must be at least 1, found 0"]),
        (["resume", "x", "--epochs", "-1"], ["--epochs must be at least 1, found -1"]),
        (["--bogus"], ["--bogus", "xtrax --help"]),
    ],
)
def test_a_usage_error_is_one_line_with_the_fix(arguments, words, capsys):
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("xtrax: ")
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_seed_the_verbs_and_their_order():
    verbs = ["plan", "explain", "export", "run", "resume", "sweep", "graph-validate", "graph-plan", "graph-author"]
    assert list(REGISTRY) == verbs


def test_a_missing_argument_is_one_line_on_a_narrow_terminal_too(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["plan"]) == 2
    assert capsys.readouterr().err == "xtrax: xtrax plan needs --fn, --shapes; see xtrax plan --help\n"


def test_the_help_of_all_lists_a_line_for_each_verb(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    for verb, (args_class, _) in REGISTRY.items():
        assert verb in out
        assert " ".join((args_class.__doc__ or "").split("\n")[0].split()[:3]) in out


def test_output_into_a_program_that_has_ended_is_no_error():
    program = "import sys; from xtrax.cli import main; sys.exit(main())"
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(program)} --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.stdout.strip() in {"141", "0"}  # 0 if all was written before the reader ended
    assert done.stderr == ""


def test_debug_shows_the_traceback_and_keeps_the_exit_code(tmp_path, capsys):
    for arguments in (["--debug", "run", "no.toml"], ["run", "no.toml", "--debug"]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert "Traceback (most recent call last)" in err
        assert "FileNotFoundError" in err
        assert err.splitlines()[-1].startswith("xtrax: no.toml: no such file")


def test_seed_another_program_adds_its_own_verbs(capsys):
    @dataclass
    class Count:
        """Count.

        Example: mine count --to 3
        """

        to: int = 1

    registry = {**REGISTRY, "count": (Count, lambda args: args.to)}
    assert main(["count", "--to", "3"], registry=registry, prog="mine") == 3
    assert main(["cuont"], registry=registry, prog="mine") == 2
    assert "mine: there is no verb 'cuont'; did you mean mine count?" in capsys.readouterr().err


def test_load_fn_finds_functions_classes_and_nested_ones():
    import math
    from collections import OrderedDict

    assert load_fn("math:sqrt") is math.sqrt
    assert load_fn("collections:OrderedDict.fromkeys")("ab") == OrderedDict.fromkeys("ab")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("optax.adam", r"'optax\.adam' is not of the form module:symbol; did you mean optax:adam\?"),
        ("adam", r"'adam' is not of the form module:symbol, such as optax:adam"),
        ("", "not of the form"),
        ("a:b:c", "not of the form"),
        ("../up:b", "not of the form"),
        ("math:", "not of the form"),
        ("math:sqrtt", r"math has no 'sqrtt'; did you mean math:sqrt\?"),
        ("math:pi", r"math:pi is not callable: it is of type float"),
        ("maath:sqrt", r"there is no module 'maath'; did you mean math\?"),
        ("zzqqzz:f", r"there is no module 'zzqqzz'; looked in .* and the installed packages"),
        ("email.mesage:Message", r"there is no module 'email\.mesage'; did you mean email\.message\?"),
        ("math.sub:f", r"math is a module, not a package: it holds no module 'sub'"),
    ],
)
def test_load_fn_tells_what_is_wrong_with_a_path(path, message):
    with pytest.raises(CLIImportError, match=message):
        load_fn(path)
    assert issubclass(CLIImportError, CLIError)


@pytest.mark.parametrize("path", [None, 3, len])
def test_load_fn_refuses_what_is_no_string(path):
    with pytest.raises(TypeError, match="path must be a string"):
        load_fn(path)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import nowhere_at_all",
            r"importing m0 failed: ModuleNotFoundError: .*'nowhere_at_all' \(m0\.py:1\)",
        ),
        ("\n\ndef f(:\n", r"importing m1 failed: SyntaxError: .* \(m1\.py:3\)"),
        (
            "def g():\n    return 1 / 0\ng()",
            r"importing m2 failed: ZeroDivisionError: .* \(m2\.py:2, in g\)",
        ),
        ("import sys\nsys.exit(3)", r"importing m3 failed: SystemExit: 3 \(m3\.py:2\)"),
        ("import json\njson.loads('{')", r"importing m4 failed: JSONDecodeError: .* \(m4\.py:2\)"),
        ("raise ValueError('first\\nsecond')", r"importing m5 failed: ValueError: first \(m5\.py:1\)$"),
    ],
    ids=range(6),
)
def test_an_error_while_importing_is_told_with_the_last_frame_of_the_users_code(
    code, message, request, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"m{request.node.callspec.id}"
    (tmp_path / f"{name}.py").write_text(code)
    with pytest.raises(CLIImportError, match=message) as caught:
        load_fn(f"{name}:f")
    assert "\n" not in str(caught.value)


def test_the_folders_given_come_before_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for folder in ("config", "current"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "which_folder.py").write_text(f"def f(): return {folder!r}")
        (tmp_path / folder / f"only_{folder}.py").write_text(f"def f(): return {folder!r}")
    monkeypatch.chdir(tmp_path / "current")
    assert load_fn("which_folder:f", import_paths=[tmp_path / "config"])() == "config"
    assert load_fn("only_current:f", import_paths=[tmp_path / "config"])() == "current"
    there = list(sys.path)
    assert load_fn("only_config:f")() == "config"  # what was put there stays
    assert sys.path == there  # and is not put there twice
