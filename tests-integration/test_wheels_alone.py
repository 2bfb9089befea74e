"""Each wheel, installed alone: its layers import, and nothing from a layer above comes along."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
UV = os.environ.get("UV") or shutil.which("uv")

# The distributions that may come along, by the design's dependency DAG, and the layers that each one ships.
BELOW = {
    "xtrax-jit": set(),
    "xtrax-tiling": {"xtrax-jit"},
    "xtrax-stages": {"xtrax-jit", "xtrax-tiling"},
    "xtrax-run": {"xtrax-jit", "xtrax-tiling", "xtrax-stages"},
    "xtrax-train": {"xtrax-jit", "xtrax-tiling", "xtrax-stages", "xtrax-run"},
    "xtrax-sparse": {"xtrax-jit"},
    "xtrax-eda": {"xtrax-jit", "xtrax-tiling"},
}
BELOW["xtrax-cli"] = set(BELOW)
BELOW["xtrax"] = set(BELOW)
SHIPS = {
    "xtrax-jit": {"jit"},
    "xtrax-tiling": {"tiling", "inference"},
    "xtrax-stages": {"stages"},
    "xtrax-run": {"run", "config"},
    "xtrax-train": {"training"},
    "xtrax-sparse": {"sparse"},
    "xtrax-eda": {"eda"},
    "xtrax-cli": {"cli"},
    "xtrax": set(),
}


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels under test, by distribution name: those in XTRAX_WHEELS, else built now."""
    assert UV, "uv is needed to build and install the wheels: python3 -m pip install uv"
    folder = os.environ.get("XTRAX_WHEELS")
    if not folder:
        folder = str(tmp_path_factory.mktemp("dist"))
        subprocess.run([UV, "build", "-q", "--all-packages", "--wheel", "-o", folder], cwd=ROOT, check=True)
    return {path.name.split("-")[0].replace("_", "-"): path for path in Path(folder).glob("*.whl")}


def metadata_of(wheel: Path):
    """The METADATA of a wheel, as an e-mail message."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def closure(wheels: dict[str, Path], name: str) -> set[str]:
    """The xtrax distributions that installing `name` pulls in, itself included, by the wheels' own metadata."""
    found = {name}
    for requirement in metadata_of(wheels[name]).get_all("Requires-Dist") or []:
        other = re.match(r"[\w.-]+", requirement).group()
        if other in wheels and "extra ==" not in requirement:
            found |= closure(wheels, other)
    return found


def test_every_package_of_the_workspace_was_built(wheels):
    folders = {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}
    assert set(wheels) == folders == set(BELOW)


@pytest.mark.parametrize("name", sorted(BELOW))
def test_wheel_carries_its_licence_readme_and_types(wheels, name):
    metadata = metadata_of(wheels[name])
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert name in metadata.get_payload(), "the README is the long description"
    with zipfile.ZipFile(wheels[name]) as archive:
        names = set(archive.namelist())
    assert {f"xtrax/{layer}/py.typed" for layer in SHIPS[name]} <= names
    # Only the meta-package may make `xtrax` a regular package; else layers would hide one another.
    assert ("xtrax/__init__.py" in names) == ("xtrax/py.typed" in names) == (name == "xtrax")


@pytest.mark.parametrize("name", sorted(BELOW))
def test_wheel_alone_imports_its_layers_and_none_above(wheels, name, tmp_path):
    needed = closure(wheels, name)
    assert needed <= BELOW[name] | {name}
    python = tmp_path / "venv" / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([UV, "venv", "-q", "--python", sys.executable, tmp_path / "venv"], check=True, env=environment)
    # Paths, not names: packages of these names from an index are not this project.
    paths = [wheels[other] for other in sorted(needed)]
    subprocess.run([UV, "pip", "install", "-q", "--python", python, *paths], check=True, env=environment)
    layers = sorted(layer for other in needed for layer in SHIPS[other])
    script = f"""
import importlib, importlib.metadata, pkgutil, sys
for layer in {layers!r}:
    importlib.import_module("xtrax." + layer)
import xtrax
present = {{m.name for m in pkgutil.iter_modules(xtrax.__path__) if not m.name.startswith("_")}}
assert present == set({layers!r}), present
ours = {{d.name for d in importlib.metadata.distributions() if d.name.startswith("xtrax")}}
assert ours == set({sorted(needed)!r}), ours
assert sys.version.startswith({version!r})
print("imported")
"""
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout == "imported\n", done.stderr
