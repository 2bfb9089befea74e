"""Hold each package's metadata against its code and against the other packages.

Checks, for every folder of `packages/`:
- the `xtrax-*` distributions it declares are those whose layers it imports (the meta-package: all of them);
- an `xtrax.<layer>` is shipped by one distribution only;
- the jax, jaxlib and Python ranges are written alike everywhere;
- each lower bound is the version that `tools/floor.txt` tests.

Usage: python tools/check_packages.py
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
META = "xtrax"

# What a layer may require, apart from jax and jaxlib: its own third parties, and all that the layers below it may.
_BELOW = {
    "xtrax-jit": [],
    "xtrax-tiling": ["xtrax-jit"],
    "xtrax-stages": ["xtrax-tiling"],
    "xtrax-run": ["xtrax-stages"],
    "xtrax-train": ["xtrax-run"],
    "xtrax-sparse": ["xtrax-jit"],
    "xtrax-eda": ["xtrax-tiling"],
    "xtrax-cli": ["xtrax-train", "xtrax-sparse", "xtrax-eda"],
}
_THIRD_PARTIES = {
    "xtrax-tiling": ["equinox", "numpy"],
    "xtrax-run": ["zarr", "rich", "cattrs"],
    "xtrax-train": ["optax", "chex", "orbax-checkpoint", "grain"],
    "xtrax-sparse": ["equinox"],
    "xtrax-cli": ["tyro", "flatbuffers"],  # `jax.export` writes its programs with it, and does not require it
}


def may_require(package: str) -> set[str]:
    """Every distribution that a layer's design lets it require."""
    allowed = {"jax", "jaxlib", *_THIRD_PARTIES.get(package, [])}
    for lower in _BELOW[package]:
        allowed |= {lower} | may_require(lower)
    return allowed


def imported_layers(source: Path) -> Iterator[tuple[str, int]]:
    """Yield `(layer, line)` for each import of `xtrax.<layer>` in a file, at any depth."""
    for node in ast.walk(ast.parse(source.read_text(), str(source))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "xtrax":
            names = [f"xtrax.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
        for name in names:
            parts = name.split(".")
            if parts[0] == "xtrax" and len(parts) > 1:
                yield parts[1], node.lineno  # ty: ignore[unresolved-attribute]


def main() -> int:
    """Print each fault and return how many there are."""
    faults: list[str] = []
    packages = {path.name: path for path in sorted((ROOT / "packages").iterdir()) if path.is_dir()}
    projects = {
        name: tomllib.loads((path / "pyproject.toml").read_text())["project"] for name, path in packages.items()
    }
    owner: dict[str, str] = {}
    for name, path in packages.items():
        if name != META:
            for layer in sorted(p.name for p in (path / "src/xtrax").iterdir() if (p / "__init__.py").exists()):
                if layer in owner:
                    faults.append(f"xtrax.{layer} is shipped by {owner[layer]} and by {name}; one must give it up")
                owner[layer] = name

    floor = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "tools/floor.txt").read_text(), flags=re.MULTILINE))
    ranges: dict[str, dict[str, list[str]]] = {}
    for name, project in projects.items():
        required = [Requirement(text) for text in project["dependencies"]]
        extras = [Requirement(text) for group in project.get("optional-dependencies", {}).values() for text in group]
        declared = {r.name for r in required if r.name in packages}
        if name == META:
            used = {other: "the meta-package ships every layer" for other in packages if other != META}
        else:
            used = {}
            for source in sorted((packages[name] / "src").rglob("*.py")):
                for layer, line in imported_layers(source):
                    where = f"{source.relative_to(ROOT)}:{line}"
                    if layer not in owner:
                        faults.append(f"{where}: imports xtrax.{layer}, which no package ships")
                    elif owner[layer] != name:
                        used.setdefault(owner[layer], where)
        faults += [
            f"{where}: {name} uses {other} but does not declare it"
            for other, where in used.items()
            if other not in declared
        ]
        faults += [
            f"packages/{name}/pyproject.toml: declares {other} but never imports it" for other in declared - used.keys()
        ]
        if name != META:
            faults += [
                f"packages/{name}/pyproject.toml: requires {r.name}, which its place in the design does not allow"
                for r in required
                if r.name not in may_require(name)
            ]
        ranges.setdefault("requires-python", {}).setdefault(project["requires-python"], []).append(name)
        for requirement in required + extras:
            if requirement.name in ("jax", "jaxlib") or requirement.name in packages:
                ranges.setdefault(requirement.name, {}).setdefault(str(requirement.specifier), []).append(name)
            lower = [Version(s.version) for s in requirement.specifier if s.operator in (">=", "==")]
            tested = floor.get(canonicalize_name(requirement.name))
            if requirement.name not in packages and (tested is None or lower != [Version(tested)]):
                faults.append(
                    f"packages/{name}/pyproject.toml: {requirement} needs exactly one lower bound, the tested one, "
                    f"but tools/floor.txt tests {tested}; CONTRIBUTING.md says how to write that file anew"
                )
    for subject, by_text in ranges.items():
        if len(by_text) > 1:
            faults.append(f"the range of {subject} is not the same everywhere: {by_text}")

    for fault in faults:
        print(fault)
    print(f"check_packages: {len(packages)} packages, {len(faults)} faults")
    return min(len(faults), 1)


if __name__ == "__main__":
    sys.exit(main())
