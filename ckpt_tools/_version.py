"""The version, in a module of its own so that nothing needs to import the package root."""

__version__ = "0.1.0"
