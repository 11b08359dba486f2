"""How tokens are chosen: a request's settings, and the maths on logits.

Logits go through three stages: adjustments (penalties, biases, ends that come too
early), filters (top-k, top-p, min-p), and the draw. The draw is
argmax(logits / temperature + Gumbel(seed, position)), an exact sample of the filtered
softmax; greedy is the same without noise. Every row of a verification pass goes through
them as a plain step does, so drafts change no text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.models.layers import argmax

BROKEN = -1  # The choice among logits that hold a NaN.
_GREEDY_BELOW = 1e-5  # Temperatures under it are greedy: one threshold for all paths.
_SMALLEST_BIAS_BUCKET = 8


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
      temperature: 0 is greedy.
      top_k: only the k likeliest tokens; 0 is all.
      top_p: only the likeliest tokens that together have this probability, after
        top_k; 1 is all.
      min_p: only tokens at least this fraction as likely as the likeliest; 0 is all.
      seed: the same seed gives the same text, whatever drafts, and beside whom.
      repetition_penalty: divides positive and multiplies negative logits of tokens in
        prompt or answer (CTRL, arXiv 1909.05858); 1 is none.
      presence_penalty: taken from logits of tokens in the answer.
      frequency_penalty: taken from them once per appearance.
      logit_bias: added to the logits of these ids.
      min_new_tokens: before so many tokens neither an ending id nor a stop string
        ends the answer.

    Raises:
      ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    min_new_tokens: int = 0

    def __post_init__(self):
        for name, (good, wanted) in _RANGES.items():
            value = getattr(self, name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not good(value):
                raise ValueError(f"{name} {value!r} must be {wanted}")
        for name in ("top_k", "seed", "min_new_tokens"):
            if not isinstance(getattr(self, name), int):
                raise ValueError(f"{name} {getattr(self, name)!r} must be an integer")
        if not isinstance(self.logit_bias, Mapping) or not all(
            isinstance(id, int) and isinstance(bias, (int, float)) and bias == bias
            for id, bias in self.logit_bias.items()
        ):
            raise ValueError(
                f"logit_bias {self.logit_bias!r:.60} must map token ids to numbers"
            )

    def check_ids(self, vocab_size: int) -> None:
        """Raises ValueError when a biased id is outside the vocabulary."""
        for id in self.logit_bias:
            if not 0 <= id < vocab_size:
                raise ValueError(
                    f"logit_bias names id {id}; the vocabulary has 0..{vocab_size - 1}"
                )


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (
        lambda t: 0 <= t < math.inf,
        "0 (greedy) or more, and finite",
    ),
    "top_k": (lambda k: k >= 0, "0 (all) or more"),
    "top_p": (lambda p: 0 <= p <= 1, "from 0 to 1 (all)"),
    "min_p": (lambda p: 0 <= p <= 1, "from 0 (all) to 1"),
    "seed": (lambda s: -(2**31) <= s < 2**31, f"within 32 bits, 0..{2**31 - 1}"),
    "repetition_penalty": (lambda r: 0 < r < math.inf, "positive; 1 is none"),
    "presence_penalty": (math.isfinite, "a finite number; 0 is none"),
    "frequency_penalty": (math.isfinite, "a finite number; 0 is none"),
    "min_new_tokens": (lambda n: n >= 0, "0 or more"),
}


@struct.dataclass
class Sampling:
    """How each row draws; traced, so that values never recompile.

    Attributes:
      temperature: `f32[B]`; 0 is greedy.
      seed: `int32[B]`; noise is a function of (seed, position) alone.
      top_k: `int32[B]`; 0 is all.
      top_p: `f32[B]`.
      min_p: `f32[B]`.
    """

    temperature: jax.Array
    seed: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array

    @classmethod
    def stack(cls, params: Sequence[SamplingParams]) -> Sampling:
        """Host arrays for rows with these settings."""
        temperature = np.array([p.temperature for p in params], np.float32)
        return cls(
            np.where(temperature < _GREEDY_BELOW, np.float32(0), temperature),
            np.array([p.seed for p in params], np.int32),
            np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
        )


@struct.dataclass
class Adjustments:
    """What is changed in each row's logits before it draws.

    Attributes:
      repetition: `f32[B]`, see `SamplingParams`, as the two after it.
      presence: `f32[B]`.
      frequency: `f32[B]`.
      prompt_length: `int32[B]`; tokens behind it are the answer.
      min_length: `int32[B]`; no end is chosen at a position before it.
      bias_ids: `int32[B, n]`, out of range where a row has fewer.
      bias: `f32[B, n]`.
    """

    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    prompt_length: jax.Array
    min_length: jax.Array
    bias_ids: jax.Array
    bias: jax.Array

    @classmethod
    def stack(
        cls, params: Sequence[SamplingParams], prompt_lengths: Sequence[int]
    ) -> Adjustments:
        """Host arrays for rows with these settings and prompts."""
        least = [p.min_new_tokens for p in params]
        most = max(len(p.logit_bias) for p in params)
        # Shapes in powers of two: the number of biases rarely compiles anything.
        width = max(_SMALLEST_BIAS_BUCKET, 1 << (most - 1).bit_length()) if most else 0
        ids = np.full((len(params), width), np.iinfo(np.int32).max, np.int32)
        bias = np.zeros((len(params), width), np.float32)
        for row, p in enumerate(params):
            ids[row, : len(p.logit_bias)] = list(p.logit_bias.keys())
            bias[row, : len(p.logit_bias)] = list(p.logit_bias.values())
        length = np.array(prompt_lengths, np.int64)
        return cls(
            np.array([p.repetition_penalty for p in params], np.float32),
            np.array([p.presence_penalty for p in params], np.float32),
            np.array([p.frequency_penalty for p in params], np.float32),
            length.astype(np.int32),
            np.minimum(length + least, 2**31 - 1).astype(np.int32),
            ids,
            bias,
        )

    def applies(self, position_BT: jax.Array) -> jax.Array:
        """Whether any of it changes a logit at these positions: `bool[]`."""
        penalties = (self.repetition != 1) | (self.presence != 0)
        penalties |= self.frequency != 0
        early = jnp.any(position_BT < self.min_length[:, None])
        return jnp.any(penalties) | early | jnp.any(self.bias != 0)


@struct.dataclass
class Text:
    """What the rows of a pass follow.

    Attributes:
      history: `int32[B, S]`, garbage behind `length`.
      length: `int32[B]`, the root included.
      tokens: `int32[B, T]`, the rows' tokens, the root first.
      mask: `bool[T, T]`, which rows precede each row in its text, itself included.
    """

    history: jax.Array
    length: jax.Array
    tokens: jax.Array
    mask: jax.Array


def adjust(
    logits_BTV: jax.Array,
    adjustments: Adjustments,
    text: Text,
    position_BT: jax.Array,
    eos_E: jax.Array,
) -> jax.Array:
    """Logits after penalties, biases, and without ends that come too early.

    Row t of a pass sees the committed tokens and the drafts before it in its own
    branch; what is refused later leaves no trace.
    """
    V = logits_BTV.shape[-1]
    slot_S = jnp.arange(text.history.shape[1])
    written_BS = slot_S < text.length[:, None]
    answer_BS = written_BS & (slot_S >= adjustments.prompt_length[:, None])
    drafts_BTV = _draft_counts(text, V)
    seen_BTV = _counts(text.history, written_BS, V)[:, None] + drafts_BTV > 0
    said_BTV = _counts(text.history, answer_BS, V)[:, None] + drafts_BTV

    def wide(value_B):
        return value_B[:, None, None]

    factor = wide(adjustments.repetition)
    factor = jnp.where(logits_BTV > 0, 1 / factor, factor)
    logits_BTV = jnp.where(seen_BTV, logits_BTV * factor, logits_BTV)
    logits_BTV -= wide(adjustments.presence) * (said_BTV > 0)
    logits_BTV -= wide(adjustments.frequency) * said_BTV
    batch_B1 = jnp.arange(len(logits_BTV))[:, None]
    bias_BV = jnp.zeros((len(logits_BTV), V)).at[batch_B1, adjustments.bias_ids]
    logits_BTV += bias_BV.add(adjustments.bias, mode="drop")[:, None]
    is_end_V = jnp.zeros(V, jnp.bool_).at[eos_E].set(True, mode="drop")
    early_BT = position_BT < adjustments.min_length[:, None]
    return jnp.where(early_BT[..., None] & is_end_V, -jnp.inf, logits_BTV)


def _counts(tokens_BS: jax.Array, counted_BS: jax.Array, vocab_size: int):
    """How often each id stands among the counted tokens: `f32[B, V]`."""
    batch_B1 = jnp.arange(len(tokens_BS))[:, None]
    zeros_BV = jnp.zeros((len(tokens_BS), vocab_size))
    return zeros_BV.at[batch_B1, tokens_BS].add(counted_BS.astype(jnp.float32))


def _draft_counts(text: Text, vocab_size: int):
    """How often each id stands among the drafts up to each row: `f32[B, T, V]`."""
    B, T = text.tokens.shape
    # The root is in the history already.
    drafts_TT = jnp.asarray(text.mask).at[:, 0].set(False).astype(jnp.float32)
    batch, row = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    zeros_BTV = jnp.zeros((B, T, vocab_size))
    return zeros_BTV.at[batch, row, text.tokens[:, None, :]].add(drafts_TT[None])


def choose(
    logits_BTV: jax.Array, sampling: Sampling, position_BT: jax.Array, head=None
) -> jax.Array:
    """Chooses the token at each position; ties go to the first in the head.

    Args:
      logits_BTV: over the vocabulary, or over the ids of a draft head; f32.
      sampling: of each row.
      position_BT: of the tokens that are chosen.
      head: the `draft_head.DraftHead` whose logits these are; each id gets the noise it
        has in the whole vocabulary, so that drafts agree with the model's choice.

    Returns:
      `int32[B, T]`; `BROKEN` where the vocabulary's logits hold a NaN.
    """

    def drawn(logits_BTV):
        is_drawn_B11 = sampling.temperature[:, None, None] > 0
        scale_B11 = jnp.where(is_drawn_B11, sampling.temperature[:, None, None], 1.0)
        kept_BTV = filtered(logits_BTV / scale_B11, sampling)
        noise_BTV = jax.vmap(_noise, (0, 0, None, None))(
            sampling.seed, position_BT, logits_BTV.shape[-1], head
        )
        noisy_BTV = jnp.where(is_drawn_B11, kept_BTV + noise_BTV, logits_BTV)
        return argmax(noisy_BTV)

    # Noise over a whole vocabulary costs as much as the head: skipped when greedy.
    chosen_BT = lax.cond(
        jnp.any(sampling.temperature > 0),
        drawn,
        argmax,
        logits_BTV,
    ).astype(jnp.int32)
    if head is not None:
        return head.ids[chosen_BT]
    # An arg-max takes the first NaN, noise or not.
    best_BT1 = jnp.take_along_axis(logits_BTV, chosen_BT[..., None], axis=-1)
    return jnp.where(jnp.isnan(best_BT1[..., 0]), BROKEN, chosen_BT)


def _noise(seed, position_T, size: int, head) -> jax.Array:
    """Gumbel noise of one sequence over the vocabulary, or a head's ids."""
    keys_T = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), position_T)
    if head is None:
        return jax.vmap(lambda key: jax.random.gumbel(key, (size,)))(keys_T)
    every = (len(head.slot),)
    return jax.vmap(lambda key: jax.random.gumbel(key, every))(keys_T)[:, head.ids]


def filtered(logits_BTV: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits, -inf outside top-k, top-p and min-p, in that order.

    Tokens as likely as the last one that is kept are kept too; the likeliest always is.
    """
    V = logits_BTV.shape[-1]

    def cut(logits_BTV):
        falling_BTV = -jnp.sort(-logits_BTV, axis=-1)
        top_k_B = jnp.where(sampling.top_k > 0, sampling.top_k, V)
        kept_BTV = jnp.arange(V) < top_k_B[:, None, None]
        possible_BTV = jnp.where(kept_BTV, falling_BTV, -jnp.inf)
        chance_BTV = jax.nn.softmax(possible_BTV, axis=-1)
        before_BTV = jnp.cumsum(chance_BTV, axis=-1) - chance_BTV
        kept_BTV &= before_BTV < sampling.top_p[:, None, None]
        kept_BTV &= chance_BTV >= sampling.min_p[:, None, None] * chance_BTV[..., :1]
        last_BT1 = jnp.maximum(jnp.sum(kept_BTV, axis=-1, keepdims=True) - 1, 0)
        least_BT1 = jnp.take_along_axis(falling_BTV, last_BT1, axis=-1)
        # A NaN is kept, for `choose` to find.
        return jnp.where(logits_BTV < least_BT1, -jnp.inf, logits_BTV)

    cuts_B = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return lax.cond(jnp.any(cuts_B), cut, lambda logits: logits, logits_BTV)


def inverse_cdf(logits_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
    """Draws from the softmax with one uniform number a row.

    One exponential per logit; Gumbel noise over the vocabulary costs as much as the
    head. Sums are taken over blocks first, so that no sum runs over the vocabulary.
    """
    B, V = logits_BV.shape
    width = 256
    padded = jnp.pad(logits_BV, ((0, 0), (0, -V % width)), constant_values=-jnp.inf)
    top_B1 = jnp.max(padded, axis=-1, keepdims=True)
    mass_Bbw = jnp.exp(padded - top_B1).reshape(B, -1, width)
    upto_Bb = jnp.cumsum(jnp.sum(mass_Bbw, axis=-1), axis=-1)
    target_B = uniform_B * upto_Bb[:, -1]
    block_B = _first_above(upto_Bb, target_B)
    before_B = jnp.where(
        block_B > 0,
        jnp.take_along_axis(upto_Bb, jnp.maximum(block_B - 1, 0)[:, None], 1)[:, 0],
        0.0,
    )
    inside_Bw = jnp.take_along_axis(mass_Bbw, block_B[:, None, None], axis=1)[:, 0]
    offset_B = _first_above(jnp.cumsum(inside_Bw, axis=-1), target_B - before_B)
    return jnp.minimum(block_B * width + offset_B, V - 1)


def _first_above(rising_Bn: jax.Array, target_B: jax.Array) -> jax.Array:
    """Index of the first entry above the target; the last one if there is none."""
    count_B = jnp.sum(rising_Bn <= target_B[:, None], axis=-1)
    return jnp.minimum(count_B, rising_Bn.shape[-1] - 1)


def log_probabilities(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Log-probability of each token under the model itself: before adjustments,
    filters and temperature; `f32[B, T]`.
    """
    own_BT1 = jnp.take_along_axis(logits_BTV, tokens_BT[..., None], axis=-1)
    return own_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)
