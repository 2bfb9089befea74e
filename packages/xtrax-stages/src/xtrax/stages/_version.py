"""The version of xtrax-stages, read by the build from here."""

__version__ = "0.4.0"
