"""Rotary position embedding (RoPE), plain, and with linear, Llama-3, YaRN and LongRoPE scaling.

Half-split convention of the HF checkpoints: channel `i` is paired with channel `i + rotary_dim / 2`. A decoder may pair
neighbours instead (`RopeSpec.interleaved`); what a cache holds is half-split all the same (see `taps.half_split`).
Su et al., 2021 (RoFormer); linear scaling: Chen et al., 2023; llama3: the Llama 3.1 release; yarn: Peng et al., 2023;
longrope: Ding et al., 2024.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_kv_jax.checks.shown import short

MOST = 1e15
"""Of bases and factors: beyond it frequencies vanish or overflow."""

SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeSpec:
    """Static description of a rotary embedding, hashable by value.

    Attributes:
        theta: base of the geometric frequency ladder.
        rotary_dim: number of leading channels of a head that are rotated (even).
        scaling: "default", "linear" (positions divided by `factor`), "llama3", "yarn" or "longrope" (of both frequencies
            only: their factor on queries and keys belongs to the model).
        factor: of every scaling but "default" and "longrope".
        low_freq_factor, high_freq_factor: only read by "llama3".
        original_context: tokens of the unscaled model, read by "llama3" and "yarn".
        beta_fast, beta_slow: only read by "yarn": turns within the original context beyond which a channel pair keeps its
            frequency, and below which it is divided by `factor`.
        truncate: only read by "yarn": the frequencies between those two are counted from a whole channel pair to a whole
            one (gpt-oss: False).
        interleaved: channel `2 i` is paired with channel `2 i + 1` (GPT-J, MaxText).
        divisors: only read by "longrope": what the frequency of each channel pair is divided by, rotary_dim / 2 numbers.

    Raises:
        ValueError: a scaling that is not known, an odd number of channels, numbers out of their range.
    """

    theta: float
    rotary_dim: int
    scaling: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    interleaved: bool = False
    divisors: tuple[float, ...] = dataclasses.field(default=(), metadata={"later": True})
    truncate: bool = dataclasses.field(default=True, metadata={"later": True})

    def __post_init__(self):
        if self.scaling not in SCALINGS:
            raise ValueError(f"rope scaling {self.scaling!r} is not one of {', '.join(map(repr, SCALINGS))}")
        if not 0 < self.rotary_dim <= 2**16 or self.rotary_dim % 2:
            raise ValueError(f"rotary_dim must be a positive even number of at most {2**16}, got "
                             f"{short(self.rotary_dim)}")
        if not 1 < self.theta <= MOST:
            raise ValueError(f"rope theta {self.theta}: must be a finite number above 1 and at most {MOST:g}")
        if not 1 <= self.factor <= MOST:
            raise ValueError(f"rope factor {self.factor}: must be a finite number of at least 1 and at most {MOST:g}")
        if self.scaling == "llama3" and not 1 / MOST < self.low_freq_factor < self.high_freq_factor <= MOST:
            raise ValueError(f"rope low_freq_factor {self.low_freq_factor}, high_freq_factor {self.high_freq_factor}: "
                             f"must be finite, the first above 0 and below the second, which is at most {MOST:g}")
        if self.scaling == "yarn" and not 1 / MOST < self.beta_slow < self.beta_fast <= MOST:
            raise ValueError(f"rope beta_slow {self.beta_slow}, beta_fast {self.beta_fast}: must be finite, the first "
                             f"above 0 and below the second, which is at most {MOST:g}")
        if self.scaling in ("llama3", "yarn") and not 1 <= self.original_context < 2**31:
            raise ValueError(f"rope original_context {self.original_context}: must lie in 1..{2**31 - 1}")
        if self.scaling == "longrope" and (
            len(self.divisors) != self.rotary_dim // 2 or not all(1 / MOST < x <= MOST for x in self.divisors)
        ):
            raise ValueError(f"rope divisors: must be {self.rotary_dim // 2} finite numbers above 0 and at most "
                             f"{MOST:g}, one for each channel pair, got {len(self.divisors)}")

    def inverse_frequencies(self) -> np.ndarray:
        """Angular frequency per channel pair, float64 `[rotary_dim / 2]`, radians per position."""
        exponent = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        freq = self.theta**-exponent
        if self.scaling == "linear":
            return freq / self.factor
        if self.scaling == "llama3":
            wavelength = 2 * math.pi / freq
            ramp = (self.original_context / wavelength - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            keep = np.clip(ramp, 0.0, 1.0)  # 1: high frequencies stay, 0: low ones are divided
            return keep * freq + (1 - keep) * freq / self.factor
        if self.scaling == "yarn":
            divided = self._yarn_ramp()
            return (1 - divided) * freq + divided * freq / self.factor
        return freq / np.asarray(self.divisors) if self.scaling == "longrope" else freq

    def _yarn_ramp(self) -> np.ndarray:
        """Share of division by `factor` of each channel pair, 0 to 1 (YaRN, section 3.2)."""

        def pair(turns: float) -> float:  # that makes so many turns within the original context
            period = self.original_context / (turns * 2 * math.pi)
            return self.rotary_dim * math.log(period) / (2 * math.log(self.theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        return np.clip((np.arange(self.rotary_dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)


def rope_angles(spec: RopeSpec, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin tables for integer `positions` `[...]`, each float32 `[..., rotary_dim / 2]`."""
    freq = jnp.asarray(spec.inverse_frequencies(), jnp.float32)
    angle = positions[..., None].astype(jnp.float32) * freq
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the leading `rotary_dim` channels of `x` `[..., D]`; `cos`, `sin` broadcast as `[..., rotary_dim / 2]`.

    Computed in float32, returned in the dtype of `x`. Channels beyond `rotary_dim` pass unchanged.
    """
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    first, second = first.astype(jnp.float32), second.astype(jnp.float32)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return jnp.concatenate([*(r.astype(x.dtype) for r in rotated), rest], axis=-1)


def half_split_channels(spec: RopeSpec | None, x: jax.Array) -> jax.Array:
    """`x` `[..., D]` with its channels in half-split order; products of two arrays so ordered are what they were."""
    if spec is None or not spec.interleaved:
        return x
    pairs = x[..., : spec.rotary_dim].reshape(*x.shape[:-1], -1, 2)
    halves = pairs.swapaxes(-1, -2).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([halves, x[..., spec.rotary_dim :]], axis=-1)


def apply_rope(spec: RopeSpec | None, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Heads `x` `[B, T, H, D]` rotated to int32 `positions` `[B, T]`, paired as `spec` says; as they are without one."""
    if spec is None:
        return x
    cos, sin = rope_angles(spec, positions[..., None])
    if not spec.interleaved:
        return rotate(x, cos, sin)
    turned = rotate(half_split_channels(spec, x), cos, sin)
    halves = turned[..., : spec.rotary_dim].reshape(*x.shape[:-1], 2, -1)
    pairs = halves.swapaxes(-1, -2).reshape(*x.shape[:-1], -1)
    return jnp.concatenate([pairs, turned[..., spec.rotary_dim :]], axis=-1)
