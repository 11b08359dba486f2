"""Rotary position embedding: frequencies, their scalings, and the turns of positions.

A scaling changes the frequencies that a model was first trained with, so that it reads
longer texts. Formulas are those of the models' own releases: linear (position
interpolation, arXiv 2306.15595), Llama 3.1's, YaRN (arXiv 2309.00071) and LongRoPE
(arXiv 2402.13753).
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

# Positions in the finer of the two tables of turns.
_TURN = 256


@dataclasses.dataclass(frozen=True)
class Linear:
    """All frequencies divided by one factor."""

    factor: float
    attention_factor = 1.0

    def scaled(self, frequencies: np.ndarray, rope: Rope) -> np.ndarray:
        del rope
        return frequencies / self.factor


@dataclasses.dataclass(frozen=True)
class Llama3:
    """Slow frequencies divided by a factor, fast ones kept, those between blended.

    Attributes:
      factor: divisor of the slow ones.
      low: turns in the original context below which a frequency is slow.
      high: turns above which it is fast.
      original_context: positions the model was first trained for.
    """

    factor: float
    low: float
    high: float
    original_context: int
    attention_factor = 1.0

    def scaled(self, frequencies: np.ndarray, rope: Rope) -> np.ndarray:
        del rope
        turns = self.original_context * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class Yarn:
    """As Llama 3's, blended linearly over the pairs between two numbers of turns.

    Attributes:
      factor: divisor of the slow frequencies.
      original_context: positions the model was first trained for.
      attention_factor: cosines and sines are multiplied by it.
      fast: turns in the original context above which a frequency is kept.
      slow: turns below which it is divided.
      truncate: whether the blend begins and ends at whole pairs.
    """

    factor: float
    original_context: int
    attention_factor: float
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True

    def scaled(self, frequencies: np.ndarray, rope: Rope) -> np.ndarray:
        size = 2 * len(frequencies)

        def pair(turns: float) -> float:
            ratio = self.original_context / (turns * 2 * math.pi)
            return size * math.log(ratio) / (2 * math.log(rope.theta))

        first, last = pair(self.fast), pair(self.slow)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, size - 1)
        width = (last - first) or 0.001
        divided = np.clip((np.arange(len(frequencies)) - first) / width, 0, 1)
        return frequencies * (1 - divided + divided / self.factor)


@dataclasses.dataclass(frozen=True)
class LongRope:
    """A divisor of its own for each frequency: one table for contexts up to the
    original one, another beyond. Keys turned by one do not fit queries turned by the
    other, so the context that a model is used with chooses, once.

    Attributes:
      short: divisors up to the original context.
      long: divisors beyond it.
      original_context: positions the model was first trained for.
      attention_factor: cosines and sines are multiplied by it.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    attention_factor: float

    def scaled(self, frequencies: np.ndarray, rope: Rope) -> np.ndarray:
        beyond = rope.context_length > self.original_context
        return frequencies / np.float64(self.long if beyond else self.short)


Scaling = Linear | Llama3 | Yarn | LongRope


@dataclasses.dataclass(frozen=True)
class Rope:
    """How queries and keys of one kind of layer are turned; hashable.

    Attributes:
      theta: base of the angles.
      head_dim: width of a head (H), even.
      context_length: positions that can be turned to.
      rotary_dim: dimensions of a head that are turned, H by default. Where it is less,
        loading has moved them to the front of both halves of the head.
      scaling: of the frequencies.
    """

    theta: float
    head_dim: int
    context_length: int
    rotary_dim: int | None = None
    scaling: Scaling | None = None

    @property
    def frequencies(self) -> np.ndarray:
        """Radians a position, of each turned pair: f64."""
        size = self.rotary_dim or self.head_dim
        frequencies = self.theta ** -(np.arange(0, size, 2) / size)
        if self.scaling is None:
            return frequencies
        return self.scaling.scaled(frequencies, self)


def rotary_turns(positions: jax.Array, rope: Rope) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines `[..., H/2]` of each pair's angle, f32, for positions `[...]`.

    The turn to a position is the turn to a multiple of `_TURN` and one of less than
    that, both from small tables. Compiled into the layers, cosines would be computed
    anew in each of them, for every head.
    """
    near, far = _turn_tables(rope)
    near_cos, near_sin = jnp.asarray(near)[:, positions % _TURN]
    far_cos, far_sin = jnp.asarray(far)[:, positions // _TURN]
    cos = near_cos * far_cos - near_sin * far_sin
    return cos, near_sin * far_cos + near_cos * far_sin


@functools.cache
def _turn_tables(rope: Rope):
    """Turns to 0.._TURN - 1, and to its multiples in the context: `[2, ..., H/2]`.

    Pairs that are not turned have the turn of position 0; the others' are stretched by
    the scaling's attention factor, in one of the tables.
    """
    frequencies = rope.frequencies
    unturned = rope.head_dim // 2 - len(frequencies)
    frequencies = np.pad(frequencies, (0, unturned))
    steps = np.arange(_TURN), np.arange(0, rope.context_length, _TURN)
    angles = [np.outer(step, frequencies) for step in steps]
    near, far = ([np.cos(angle), np.sin(angle)] for angle in angles)
    stretch = 1.0 if rope.scaling is None else rope.scaling.attention_factor
    turned = np.arange(len(frequencies)) < len(frequencies) - unturned
    return np.float32(np.where(turned, stretch, 1.0) * near), np.float32(far)


def rotate(x_BRKGH: jax.Array, turns: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Applies rotary position embedding; pairs are (i, i + H/2).

    Args:
      x_BRKGH: queries or keys.
      turns: cosines and sines `[B, R, H/2]`, from `rotary_turns`.
    """
    cos, sin = (turn_BRh[:, :, None, None] for turn_BRh in turns)
    left, right = jnp.split(x_BRKGH.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)
    return turned.astype(x_BRKGH.dtype)
