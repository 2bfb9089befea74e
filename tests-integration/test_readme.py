"""What README.md tells a newcomer to type is what CI runs."""

import re
import tomllib
from pathlib import Path

import pytest

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


def layers_below(name: str) -> set[str]:
    """The distributions of this project that one needs, itself included."""
    project = tomllib.loads((ROOT / "packages" / name / "pyproject.toml").read_text())["project"]
    needed = {re.match("[a-z-]+", need)[0] for need in project["dependencies"] if need.startswith("xtrax")}
    return {name}.union(*map(layers_below, needed))


@pytest.mark.parametrize("readme", sorted(p.relative_to(ROOT) for p in ROOT.glob("packages/*/README.md")), ids=str)
def test_no_install_command_leaves_a_layer_to_a_public_index(readme):
    text = (ROOT / readme).read_text().replace("\\\n", " ")
    commands = re.findall(r"python3? -m pip install (.*)$", text, flags=re.MULTILINE)
    assert commands
    for command in commands:
        if "*.whl" in command and re.search(r"dist/(xtrax_)?\*\.whl", command):
            continue  # every wheel
        named = {name.replace("_", "-") for name in re.findall(r"xtrax[-_][a-z]+|xtrax(?= @)", command)}
        assert set().union(*map(layers_below, named)) == named, command
        assert "--find-links" not in command  # which lets an index win
