"""TOML configuration that fails loudly, for any domain. Imports no jax.

Every error is raised as the exception class that the caller passes in, with a message of one line a fault:
`file:line: dotted.key: what is wrong and what to do`.
"""

from xtrax.config._dataclass import load_dataclass, structure_dataclass
from xtrax.config._document import TomlDocument, load_toml_document
from xtrax.config._dump import dump_toml
from xtrax.config._overrides import apply_overrides
from xtrax.config._require import require_field, require_sections
from xtrax.config._schema import SchemaVersionStatus, check_schema_version, classify_schema_version
from xtrax.config._version import __version__

__all__ = [
    "SchemaVersionStatus",
    "TomlDocument",
    "__version__",
    "apply_overrides",
    "check_schema_version",
    "classify_schema_version",
    "dump_toml",
    "load_dataclass",
    "load_toml_document",
    "require_field",
    "require_sections",
    "structure_dataclass",
]
