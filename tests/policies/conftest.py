"""Small annotated modules with everything that can be right or wrong about an annotation."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from overspill import policies
from overspill.policies import Activation


class Cell(eqx.Module):
    """x + silu(sin(x A) * t) B, with a name on each step. `fault` breaks one thing about the names."""

    first: jax.Array
    second: jax.Array
    block_input: Activation
    projected: Activation
    hidden: Activation
    output: Activation
    again: Activation | None
    fault: str = eqx.field(static=True)

    def __init__(self, key, size=8, fault=""):
        first, second = jax.random.split(key)
        self.first = jax.random.normal(first, (size, size)) / size**0.5
        self.second = jax.random.normal(second, (size, size)) / size**0.5
        self.block_input = Activation("block_input", recomputable=False)
        self.projected = Activation("projected")
        self.hidden = Activation("hidden")
        self.output = Activation("output")
        self.again = Activation("again") if fault == "alias" else None
        self.fault = fault

    def __call__(self, x, table):
        raw = x
        x = self.block_input(x)
        projected = (raw if self.fault == "raw" else x) @ self.first
        if self.fault != "untagged":
            projected = self.projected(projected)
        hidden = self.hidden(jax.nn.silu(jnp.sin(projected) * table))
        if self.fault == "alias":
            hidden = self.again(hidden.reshape(-1)).reshape(hidden.shape)
        return x + self.output(hidden @ self.second)


class Tower(eqx.Module):
    """Cells one after the other, by a scan or by a loop."""

    cells: Cell
    scan: bool = eqx.field(static=True)

    def __init__(self, layers=3, *, fault="", scan=True, key=None):
        keys = jax.random.split(jax.random.key(0) if key is None else key, layers)
        self.cells = eqx.filter_vmap(lambda k: Cell(k, fault=fault))(keys)
        self.scan = scan

    def __call__(self, x, checkpoint=policies.checkpoint):
        self = policies.named(self)
        table = jnp.cos(jnp.arange(x.shape[-1], dtype=jnp.float32)).astype(x.dtype)
        wrap = (lambda cell: cell) if checkpoint is None else checkpoint
        if self.scan:
            dynamic, static = eqx.partition(self.cells, eqx.is_array)
            return jax.lax.scan(lambda c, d: (wrap(eqx.combine(d, static))(c, table), None), x, dynamic)[0]
        for i in range(self.cells.first.shape[0]):
            x = wrap(jax.tree.map(lambda leaf: leaf[i], self.cells))(x, table)
        return x


@pytest.fixture
def cell():
    return Cell(jax.random.key(1))


@pytest.fixture
def tower():
    return Tower


@pytest.fixture
def make_cell():
    return Cell


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(2), (4, 8))
