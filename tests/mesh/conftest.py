"""Meshes of eight CPU devices, of either kind of axes."""

import jax
import pytest
from jax.sharding import AxisType


@pytest.fixture
def make_mesh():
    """`make_mesh("data=2,tensor=4", AxisType.Explicit)`: all axes of one kind, Auto by default."""
    assert jax.device_count() >= 8, "these tests need eight devices: tests/conftest.py asks for them"

    def make(text, kind=AxisType.Auto):
        sizes = {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
        return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))

    return make
