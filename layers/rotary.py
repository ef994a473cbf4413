"""Rotary position embeddings (Su et al., 2021) and the ways released models stretch them to long contexts."""

import dataclasses
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..policies.axes import any_mesh

# Config files write whole numbers without a point.
Number = float | int
Tables = tuple[Float[Array, "rows sequence half"], Float[Array, "rows sequence half"]]


def _positive(owner: str, **values: Number | None) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{owner}: {name} must be positive, got {value!r}")


def _frequencies(theta: Number, dim: int) -> np.ndarray:
    """`1 / theta^(2j/dim)` for j = 0 .. dim/2 - 1, float32 at each step as in the reference implementations."""
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    return (np.float32(1) / np.power(np.float32(theta), exponents)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class RotaryScaling:
    """How frequencies are changed for long contexts. This one leaves them alone: the `default` kind.

    The names of fields in the kinds below are those of `rope_scaling` in Hugging Face config files.
    """

    def check(self, dim: int, max_positions: int) -> None:
        """Raises ValueError when the scaling doesn't fit a rotary embedding of these sizes."""

    def frequencies(self, positions: Int[Array, "rows sequence"], theta: Number, dim: int, max_positions: int) -> Array:
        """The `dim / 2` inverse frequencies, float32."""
        return jnp.asarray(_frequencies(theta, dim))

    def attention_scale(self, max_positions: int) -> float:
        """What cosine and sine are multiplied by."""
        return 1.0

    def softmax_scale(self, max_positions: int) -> float:
        """What MLA multiplies its softmax scale by, on top of `attention_scale`."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class LinearScaling(RotaryScaling):
    """Positions are divided by `factor` (Chen et al., 2023)."""

    factor: Number

    def check(self, dim: int, max_positions: int) -> None:
        _positive("linear rotary scaling", factor=self.factor)

    def frequencies(self, positions: Int[Array, "rows sequence"], theta: Number, dim: int, max_positions: int) -> Array:
        return jnp.asarray(_frequencies(theta, dim) / np.float32(self.factor))


@dataclasses.dataclass(frozen=True)
class DynamicScaling(RotaryScaling):
    """A base that grows with the sequence once it is longer than `max_positions` (dynamic NTK).

    The length is the largest position of the batch plus one, so all rows of a batch share it.
    """

    factor: Number

    def check(self, dim: int, max_positions: int) -> None:
        _positive("dynamic rotary scaling", factor=self.factor)
        if dim <= 2:
            raise ValueError(f"dynamic rotary scaling: the rotary dim must be 4 or more, got {dim}")

    def frequencies(self, positions: Int[Array, "rows sequence"], theta: Number, dim: int, max_positions: int) -> Array:
        length = jnp.maximum(jnp.max(positions) + 1, max_positions).astype(jnp.float32)
        growth = self.factor * length / max_positions - (self.factor - 1)
        base = theta * growth ** (dim / (dim - 2))
        stretched = 1 / base ** (jnp.arange(0, dim, 2, dtype=jnp.float32) / dim)
        # Short sequences get the very digits of the unscaled table.
        return jnp.where(length > max_positions, stretched, _frequencies(theta, dim))


@dataclasses.dataclass(frozen=True)
class Llama3Scaling(RotaryScaling):
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""

    factor: Number
    low_freq_factor: Number
    high_freq_factor: Number
    original_max_position_embeddings: int

    def check(self, dim: int, max_positions: int) -> None:
        _positive("llama3 rotary scaling", **dataclasses.asdict(self))
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"llama3 rotary scaling: low_freq_factor ({self.low_freq_factor}) must be smaller than "
                f"high_freq_factor ({self.high_freq_factor})"
            )

    def frequencies(self, positions: Int[Array, "rows sequence"], theta: Number, dim: int, max_positions: int) -> Array:
        plain = _frequencies(theta, dim)
        wavelength = np.float32(2 * math.pi) / plain
        original = self.original_max_position_embeddings
        low, high = self.low_freq_factor, self.high_freq_factor
        share = (np.float32(original) / wavelength - np.float32(low)) / np.float32(high - low)
        slow = plain / np.float32(self.factor)
        between = (1 - share) * slow + share * plain
        chosen = np.where(wavelength > original / low, slow, np.where(wavelength < original / high, plain, between))
        return jnp.asarray(chosen.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class YarnScaling(RotaryScaling):
    """YaRN (Peng et al., 2023), with DeepSeek's two independent corrections.

    Cosine and sine are multiplied by `attention_factor`, or by the ratio of the two mscale values, or by YaRN's
    own `0.1 ln(factor) + 1`. MLA's softmax scale is multiplied by the square of the `mscale_all_dim` value.
    `factor=None` means `max_positions / original_max_position_embeddings`.
    """

    factor: Number | None
    original_max_position_embeddings: int
    beta_fast: Number | None = None
    beta_slow: Number | None = None
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    attention_factor: Number | None = None
    truncate: bool = True

    def check(self, dim: int, max_positions: int) -> None:
        _positive(
            "yarn rotary scaling",
            factor=self.factor,
            original_max_position_embeddings=self.original_max_position_embeddings,
            beta_fast=self.beta_fast or None,
            beta_slow=self.beta_slow or None,
            attention_factor=self.attention_factor,
        )

    def _factor(self, max_positions: int) -> Number:
        return max_positions / self.original_max_position_embeddings if self.factor is None else self.factor

    def correction_range(self, theta: Number, dim: int) -> tuple[Number, Number]:
        """The frequency indices between which the ramp runs: below, unchanged; above, divided by the factor."""

        def index(rotations: Number) -> float:
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return dim * math.log(turns) / (2 * math.log(theta))

        low, high = index(self.beta_fast or 32), index(self.beta_slow or 1)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        return max(low, 0), min(high, dim - 1)

    def frequencies(self, positions: Int[Array, "rows sequence"], theta: Number, dim: int, max_positions: int) -> Array:
        low, high = self.correction_range(theta, dim)
        if low == high:
            high += 0.001
        plain = _frequencies(theta, dim)
        ramp = np.clip((np.arange(dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
        slow = plain / np.float32(self._factor(max_positions))
        return jnp.asarray((slow * ramp + plain * (1 - ramp)).astype(np.float32))

    def attention_scale(self, max_positions: int) -> float:
        factor = self._factor(max_positions)
        if self.attention_factor is not None:
            return float(self.attention_factor)
        if self.mscale and self.mscale_all_dim:
            return _mscale(factor, self.mscale) / _mscale(factor, self.mscale_all_dim)
        return _mscale(factor, 1.0)

    def softmax_scale(self, max_positions: int) -> float:
        return _mscale(self._factor(max_positions), self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _mscale(factor: Number, mscale: Number) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling(RotaryScaling):
    """LongRoPE (Ding et al., 2024): each frequency has its own divisor, one set for short and one for long batches.

    The long set is used when the largest position of the batch reaches `original_max_position_embeddings`.
    `factor=None` means `max_positions / original_max_position_embeddings`.
    """

    short_factor: tuple[Number, ...]
    long_factor: tuple[Number, ...]
    original_max_position_embeddings: int
    factor: Number | None = None
    attention_factor: Number | None = None

    def check(self, dim: int, max_positions: int) -> None:
        owner = "longrope rotary scaling"
        _positive(
            owner,
            factor=self.factor,
            original_max_position_embeddings=self.original_max_position_embeddings,
            attention_factor=self.attention_factor,
        )
        for name in ("short_factor", "long_factor"):
            divisors = getattr(self, name)
            if len(divisors) != dim // 2 or not all(divisor > 0 for divisor in divisors):
                raise ValueError(f"{owner}: {name} must hold {dim // 2} positive numbers, got {divisors!r}")

    def frequencies(self, positions: Int[Array, "rows sequence"], theta: Number, dim: int, max_positions: int) -> Array:
        powers = np.power(np.float32(theta), np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        short, long = (
            (np.float32(1) / (np.asarray(divisors, np.float32) * powers)).astype(np.float32)
            for divisors in (self.short_factor, self.long_factor)
        )
        return jnp.where(jnp.max(positions) + 1 > self.original_max_position_embeddings, long, short)

    def attention_scale(self, max_positions: int) -> float:
        original = self.original_max_position_embeddings
        factor = max_positions / original if self.factor is None else self.factor
        if self.attention_factor is not None:
            return float(self.attention_factor)
        return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


class Rotary(eqx.Module):
    """A rotary embedding of the first `dim` features of each head. It holds no arrays: all fields are static.

    `interleaved` is the layout of the features. False (Llama, Qwen, Mistral and most Hugging Face files): feature
    j is rotated with feature `j + dim/2`. True (DeepSeek's files): feature 2j is rotated with feature 2j + 1, and
    the result is written in half-split order, as Hugging Face's DeepSeek-V3 does; scores don't notice, because
    queries and keys are reordered alike.
    """

    dim: int = eqx.field(static=True)
    theta: Number = eqx.field(static=True)
    max_positions: int = eqx.field(static=True)
    scaling: RotaryScaling = eqx.field(static=True, default=RotaryScaling())
    interleaved: bool = eqx.field(static=True, default=False)

    def __check_init__(self):
        if self.dim < 2 or self.dim % 2:
            raise ValueError(f"Rotary: dim must be even and positive, got {self.dim!r}")
        if not self.theta > 1:
            raise ValueError(f"Rotary: theta must be larger than 1, got {self.theta!r}")
        _positive("Rotary", max_positions=self.max_positions)
        self.scaling.check(self.dim, self.max_positions)

    @jax.named_scope("rotary_tables")
    def tables(self, positions: Int[Array, "rows sequence"], dtype: jnp.dtype | type = jnp.float32) -> Tables:
        """Cosine and sine of every phase, `[rows, sequence, dim / 2]` each, to be shared by all layers.

        Phases are float32 whatever `dtype` is (bfloat16 can't tell positions above 256 apart); the attention
        factor of the scaling is applied, then the tables are cast to `dtype`. `positions` may have one row for
        the whole batch.
        """
        frequencies = self.scaling.frequencies(positions, self.theta, self.dim, self.max_positions)
        phases = positions.astype(jnp.float32)[..., None] * frequencies
        scale = self.scaling.attention_scale(self.max_positions)
        return (jnp.cos(phases) * scale).astype(dtype), (jnp.sin(phases) * scale).astype(dtype)

    @jax.named_scope("rotary")
    @any_mesh
    def apply(self, x: Float[Array, "batch sequence heads features"], tables: Tables) -> Array:
        """`x` with the first `dim` features of each head rotated, the rest as they are; same shape and dtype.

        Raises ValueError when `x` has fewer features than `dim`.
        """
        if x.shape[-1] < self.dim:
            raise ValueError(f"Rotary: dim {self.dim} does not fit into heads of {x.shape[-1]} features")
        cos, sin = (table[:, :, None, :].astype(x.dtype) for table in tables)
        half = self.dim // 2
        if self.interleaved:
            first, second = x[..., 0 : self.dim : 2], x[..., 1 : self.dim : 2]
        else:
            first, second = x[..., :half], x[..., half : self.dim]
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., self.dim :]], axis=-1)

    def half_split(self) -> "Rotary":
        """This embedding for features in half-split layout; the tables are the same."""
        return Rotary(self.dim, self.theta, self.max_positions, self.scaling)

    @property
    def softmax_scale_factor(self) -> float:
        """What MLA multiplies its softmax scale by: YaRN's squared `mscale_all_dim` value, 1.0 without one."""
        return self.scaling.softmax_scale(self.max_positions)
