"""What a request's settings change in logits before the draw.

Penalties, biases, and ends that come too early. All values stay finite: forbidden ids
get `FORBIDDEN`, which no temperature makes infinite.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from m2r2_jax.decoding.settings import LIMIT, SamplingParams

FORBIDDEN = -1e30  # The logit of an id that may not be chosen.
_SMALLEST_BIAS_BUCKET = 8


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
            values = np.array(list(p.logit_bias.values()))
            bias[row, : len(values)] = np.where(values <= -LIMIT, FORBIDDEN, values)
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

    Ids that are brought below -`LIMIT` by them are forbidden.

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
    logits_BTV -= jnp.where(said_BTV > 0, wide(adjustments.presence), 0.0)
    logits_BTV -= wide(adjustments.frequency) * said_BTV
    batch_B1 = jnp.arange(len(logits_BTV))[:, None]
    biases = jnp.zeros((len(logits_BTV), V), jnp.float32).at[
        batch_B1, adjustments.bias_ids
    ]
    logits_BTV += biases.add(adjustments.bias, mode="drop")[:, None]
    is_end_V = jnp.zeros(V, jnp.bool_).at[eos_E].set(True, mode="drop")
    early_BT = position_BT < adjustments.min_length[:, None]
    forbidden_BTV = (logits_BTV <= -LIMIT) | (early_BT[..., None] & is_end_V)
    return jnp.where(forbidden_BTV, FORBIDDEN, logits_BTV)


def _counts(tokens_BS: jax.Array, counted_BS: jax.Array, vocab_size: int):
    """How often each id stands among the counted tokens: `f32[B, V]`."""
    batch_B1 = jnp.arange(len(tokens_BS))[:, None]
    zeros_BV = jnp.zeros((len(tokens_BS), vocab_size), jnp.float32)
    return zeros_BV.at[batch_B1, tokens_BS].add(counted_BS.astype(jnp.float32))


def _draft_counts(text: Text, vocab_size: int):
    """How often each id stands among the drafts up to each row: `f32[B, T, V]`."""
    B, T = text.tokens.shape
    # The root is in the history already.
    drafts_TT = jnp.asarray(text.mask).at[:, 0].set(False).astype(jnp.float32)
    batch, row = jnp.arange(B)[:, None, None], jnp.arange(T)[None, :, None]
    zeros_BTV = jnp.zeros((B, T, vocab_size), jnp.float32)
    return zeros_BTV.at[batch, row, text.tokens[:, None, :]].add(drafts_TT[None])
