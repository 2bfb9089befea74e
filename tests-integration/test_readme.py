"""What README.md tells a newcomer to type is what CI runs."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commands() -> list[str]:
    """The indented command lines of the README, in order."""
    return re.findall(r"^    (python3 -m pip install .*)$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)


def test_the_first_command_trains_the_example():
    config = commands()[0].split()[-1]
    assert commands()[0] == f"python3 -m pip install -q uv && python3 -m uv run xtrax run {config}"
    assert (ROOT / config).is_file()


def test_ci_runs_the_test_command_as_it_stands():
    last = (ROOT / ".ci" / "run").read_text().splitlines()[-1]
    assert commands()[1] == last


def test_every_package_is_in_the_table():
    text = (ROOT / "README.md").read_text()
    for package in ROOT.glob("packages/*/pyproject.toml"):
        assert f"](packages/{package.parent.name}/)" in text
