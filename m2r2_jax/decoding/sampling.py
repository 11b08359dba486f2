"""The draw: which token is chosen among a position's logits, adjusted before.

Filters (top-k, top-p, min-p), then argmax(logits / temperature + Gumbel(seed,
position)), an exact sample of the filtered softmax; greedy is the same without noise.
Every row of a verification pass goes through them as a plain step does, so drafts
change no text.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.decoding.adjustments import FORBIDDEN
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.models.layers import argmax

BROKEN = -1  # The choice among logits that hold a NaN.
NOTHING = -2  # The choice where settings have forbidden every token.
_GREEDY_BELOW = 1e-5  # Temperatures under it are greedy: one threshold for all paths.


@struct.dataclass
class Sampling:
    """How each row draws; traced, so that values never recompile.

    Attributes:
      temperature: `f32[B]`; 0 is greedy.
      seed: `uint32[B, 2]`, high and low half; noise is a function of (seed, position)
        alone.
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
        seed = np.array([p.seed % 2**64 for p in params], np.uint64)
        return cls(
            np.where(temperature < _GREEDY_BELOW, np.float32(0), temperature),
            np.stack([seed >> 32, seed & 0xFFFFFFFF], axis=1).astype(np.uint32),
            np.array([min(p.top_k, 2**31 - 1) for p in params], np.int32),
            np.array([p.top_p for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
        )


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
      `int32[B, T]`; `BROKEN` where the vocabulary's logits hold a NaN, `NOTHING` where
      all of them are forbidden.
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
    best_BT = jnp.take_along_axis(logits_BTV, chosen_BT[..., None], axis=-1)[..., 0]
    chosen_BT = jnp.where(best_BT <= FORBIDDEN, NOTHING, chosen_BT)
    return jnp.where(jnp.isnan(best_BT), BROKEN, chosen_BT)


def _noise(seed_2, position_T, size: int, head) -> jax.Array:
    """Gumbel noise of one sequence over the vocabulary, or a head's ids."""
    # Of a seed of 32 bits, the key that `jax.random.key` makes.
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    keys_T = jax.vmap(jax.random.fold_in, (None, 0))(key, position_T)
    every = size if head is None else len(head.slot)
    noise_TV = jax.vmap(lambda key: jax.random.gumbel(key, (every,), jnp.float32))(
        keys_T
    )
    return noise_TV if head is None else noise_TV[:, head.ids]


def filtered(logits_BTV: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits, `FORBIDDEN` outside top-k, top-p and min-p, in that order.

    Tokens as likely as the last one that is kept are kept too; the likeliest always is.
    """
    V = logits_BTV.shape[-1]

    def cut(logits_BTV):
        falling_BTV = -jnp.sort(-logits_BTV, axis=-1)
        top_k_B = jnp.where(sampling.top_k > 0, sampling.top_k, V)
        kept_BTV = jnp.arange(V) < top_k_B[:, None, None]
        possible_BTV = jnp.where(kept_BTV, falling_BTV, FORBIDDEN)
        chance_BTV = jax.nn.softmax(possible_BTV, axis=-1)
        before_BTV = jnp.cumsum(chance_BTV, axis=-1) - chance_BTV
        kept_BTV &= before_BTV < sampling.top_p[:, None, None]
        kept_BTV &= chance_BTV >= sampling.min_p[:, None, None] * chance_BTV[..., :1]
        last_BT1 = jnp.maximum(jnp.sum(kept_BTV, axis=-1, keepdims=True) - 1, 0)
        least_BT1 = jnp.take_along_axis(falling_BTV, last_BT1, axis=-1)
        # A NaN is kept, for `choose` to find.
        return jnp.where(logits_BTV < least_BT1, FORBIDDEN, logits_BTV)

    cuts_B = (sampling.top_k > 0) | (sampling.top_p < 1) | (sampling.min_p > 0)
    return lax.cond(jnp.any(cuts_B), cut, lambda logits: logits, logits_BTV)


def log_probabilities(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Log-probability of each token under the model itself: before adjustments,
    filters and temperature; `f32[B, T]`.
    """
    own_BT1 = jnp.take_along_axis(logits_BTV, tokens_BT[..., None], axis=-1)
    return own_BT1[..., 0] - jax.nn.logsumexp(logits_BTV, axis=-1)
