"""`import xtrax` is cheap, lists every public name, and says what to do where one cannot be had."""

import ast
import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import xtrax
from xtrax import _lazy


def in_a_new_process(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_loads_no_layer_and_no_jax():
    script = "import sys, xtrax; print(sorted(m for m in sys.modules if m.startswith(('jax', 'xtrax.', 'numpy'))))"
    assert in_a_new_process(script) == "['xtrax._lazy', 'xtrax._version']"


def test_version_is_the_distributions():
    assert xtrax.__version__ == metadata.version("xtrax")
    assert xtrax.__version__.startswith("0.4.0")


@pytest.mark.parametrize("name", sorted(_lazy.LAYER_BY_NAME))
def test_name_is_the_layers_own_object(name):
    layer = importlib.import_module(f"xtrax.{_lazy.LAYER_BY_NAME[name]}")
    assert getattr(xtrax, name) is getattr(layer, name)
    assert name in dir(xtrax)


@pytest.mark.parametrize("layer", sorted(_lazy.DISTRIBUTIONS))
def test_layer_is_a_lazy_attribute(layer):
    code = f"import xtrax; print(xtrax.{layer}.__name__, xtrax.{layer}.__version__)"
    version = metadata.version(_lazy.DISTRIBUTIONS[layer])
    assert in_a_new_process(code) == f"xtrax.{layer} {version}"
    assert layer in dir(xtrax)


def test_type_checkers_see_exactly_the_names_that_resolve():
    tree = ast.parse(Path(xtrax.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name))
    seen = {alias.asname for node in guard.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == set(_lazy.NAMES)


def test_dir_lists_all_names():
    assert set(dir(xtrax)) == set(_lazy.NAMES) | {"__version__"}


def test_unknown_name_suggests_the_nearest():
    with pytest.raises(AttributeError, match=r"no attribute 'AxisSpek'; did you mean 'xtrax\.AxisSpec'"):
        _ = xtrax.AxisSpek  # ty: ignore[unresolved-attribute]
    with pytest.raises(AttributeError, match=r"no attribute 'qqqqqqq'; dir\(xtrax\) lists"):
        _ = xtrax.qqqqqqq  # ty: ignore[unresolved-attribute]


def test_missing_layer_says_which_distribution_to_install():
    script = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "xtrax.tiling":
            raise ModuleNotFoundError("No module named 'xtrax.tiling'", name="xtrax.tiling")
sys.meta_path.insert(0, Missing())
from importlib import metadata
real = metadata.version
def version(name):
    if name == "xtrax-tiling":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
import xtrax
for read in (lambda: xtrax.AxisSpec, lambda: xtrax.tiling):
    try:
        read()
    except ImportError as error:
        print(error)
"""
    line = "xtrax.tiling cannot be imported: xtrax-tiling is not installed; install the wheel of xtrax-tiling"
    first, second = in_a_new_process(script).splitlines()
    assert first.startswith(line)
    assert second.startswith(line)


def test_layer_that_is_too_old_is_named():
    script = """
import xtrax, xtrax.tiling
del xtrax.tiling.AxisSpec
try:
    xtrax.AxisSpec
except ImportError as error:
    print(error)
"""
    line = in_a_new_process(script)
    found = metadata.version("xtrax-tiling")
    assert line.startswith(
        f"xtrax.AxisSpec is not in xtrax.tiling: xtrax-tiling {found} is too old for the other layers; install"
    )
    assert "\n" not in line


def test_third_party_that_is_missing_speaks_for_itself():
    script = """
import sys
sys.modules["jax"] = None
import xtrax
try:
    xtrax.AxisSpec
except ImportError as error:
    print(error)
"""
    assert "jax" in in_a_new_process(script)
    assert "xtrax-" not in in_a_new_process(script)


def test_versions_name_every_distribution():
    found = xtrax.versions()
    assert set(found) == {"xtrax", *_lazy.DISTRIBUTIONS.values(), "jax", "jaxlib"}
    assert all(found[name] == metadata.version(name) for name in found)
