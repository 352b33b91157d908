"""The version of this package, which runs and reports name."""

__version__ = "0.2.0"
