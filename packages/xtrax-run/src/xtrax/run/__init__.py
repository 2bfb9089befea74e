"""What a run leaves behind. Importing it imports no jax."""

from xtrax.config import __version__
from xtrax.run._json import write_json_atomic
from xtrax.run._provenance import collect_provenance

__all__ = ["__version__", "collect_provenance", "write_json_atomic"]
