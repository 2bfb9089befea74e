"""The version of xtrax-eda, read by the build from here."""

__version__ = "0.4.0"
