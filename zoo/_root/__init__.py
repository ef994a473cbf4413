"""Overspill: a model zoo for JAX whose layers know where their activations wait."""

from importlib.metadata import version as _version

__version__ = _version("overspill")
