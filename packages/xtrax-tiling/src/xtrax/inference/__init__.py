"""Read the axes and the outputs of a function off its signature."""

from xtrax.inference._errors import StructureMismatchError
from xtrax.inference._infer import infer_bundle
from xtrax.inference._override import AxisOverride, axis_config
from xtrax.inference._schema import BundleSchema
from xtrax.inference._verify import verify_structure
from xtrax.tiling._version import __version__
from xtrax.tiling.independence import IndependenceReport, check_independence

__all__ = [
    "AxisOverride",
    "BundleSchema",
    "IndependenceReport",
    "StructureMismatchError",
    "__version__",
    "axis_config",
    "check_independence",
    "infer_bundle",
    "verify_structure",
]
