"""The version, once: packaging reads it here, and so may every module."""

__version__ = "0.1.0"
