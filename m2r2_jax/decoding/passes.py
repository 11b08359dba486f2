"""Passes of the full model: over a prompt in chunks, and over the rows of a round."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from m2r2_jax.decoding import sampling
from m2r2_jax.decoding.adjustments import Text, adjust
from m2r2_jax.decoding.state import DecodeState
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder
from m2r2_jax.ops import compilation

PREFILL_CHUNK = 256  # Rows per prefill call at most: bounds the attention scores.
_SMALLEST_BUCKET = 16


def chunk_sizes(count: int) -> list[int]:
    """Padded sizes of the calls that prefill `count` positions.

    Full chunks, then the smallest power-of-two bucket that holds the rest, so that
    the number of compiled shapes is fixed.
    """
    full, rest = divmod(count, PREFILL_CHUNK)
    sizes = [PREFILL_CHUNK] * full
    if rest:
        bucket = _SMALLEST_BUCKET
        while bucket < rest:
            bucket *= 2
        sizes.append(bucket)
    return sizes


@functools.partial(
    compilation.jit, static_argnames=("decoder",), donate_argnames=("cache",)
)
def prefill(
    decoder: Decoder,
    params: dict,
    cache: KVCache,
    hidden_BD: jax.Array,
    tokens_BC: jax.Array,
    count_B: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Appends one chunk of prompt tokens to the cache.

    Args:
      decoder: the model, and how it runs.
      params: its parameters.
      cache: donated.
      hidden_BD: normalised final state of the last token so far.
      tokens_BC: the chunk, padded behind each row's count.
      count_B: real tokens of each row, 0..C.

    Returns:
      The cache, and the normalised final state of each row's last token so far.
    """
    C = tokens_BC.shape[1]
    causal_CC = jnp.tril(jnp.ones((C, C), jnp.bool_))
    rows = transformer.cached_rows(decoder.config, cache, jnp.arange(C), causal_CC)
    x_BCD, cache = transformer.run_layers(
        decoder,
        params["blocks"],
        transformer.embed(decoder.config, params, tokens_BC),
        rows,
        cache,
        0,
        decoder.config.num_layers,
    )
    last_B = jnp.maximum(count_B - 1, 0)
    x_BD = jnp.take_along_axis(x_BCD, last_B[:, None, None], axis=1)[:, 0]
    fresh_BD = transformer.final_norm(decoder.config, params, x_BD)
    hidden_BD = jnp.where(count_B[:, None] > 0, fresh_BD, hidden_BD)
    return cache.advance(count_B), hidden_BD


def score(
    decoder: Decoder,
    params: dict,
    cache: KVCache,
    tokens_BR: jax.Array,
    offset_R: jax.Array,
    mask_RR: jax.Array,
    hidden_BRD: jax.Array | None = None,
    start_layer: int = 0,
) -> tuple[jax.Array, jax.Array, KVCache]:
    """Runs rows through the model and writes them into the cache's scratch slots.

    Args:
      decoder: the model, and how it runs.
      params: its parameters.
      cache: not advanced.
      tokens_BR: the rows' tokens.
      offset_R: position of each row relative to the cache's length.
      mask_RR: which of the rows each row may read.
      hidden_BRD: the rows' states at `start_layer` when earlier layers have run.
      start_layer: the first layer to run.

    Returns:
      Normalised final states `[B, R, D]`, logits `[B, R, V]` (f32), the cache.
    """
    rows = transformer.cached_rows(decoder.config, cache, offset_R, mask_RR)
    x_BRD = hidden_BRD
    if start_layer == 0:
        x_BRD = transformer.embed(decoder.config, params, tokens_BR)
    x_BRD, cache = transformer.run_layers(
        decoder,
        params["blocks"],
        x_BRD,
        rows,
        cache,
        start_layer,
        decoder.config.num_layers,
    )
    x_BRD = transformer.final_norm(decoder.config, params, x_BRD)
    return x_BRD, transformer.unembed(decoder, params, x_BRD), cache


def choose_next(
    state: DecodeState,
    logits_BRV: jax.Array,
    tokens_BR: jax.Array,
    offset_R: np.ndarray,
    mask_RR: np.ndarray,
) -> tuple[jax.Array, jax.Array]:
    """The model's choice behind each row, and its log-probability where asked for.

    Args:
      state: before the pass.
      logits_BRV: of the rows.
      tokens_BR: the rows' tokens, the root first.
      offset_R: as for `score`.
      mask_RR: as for `score`.
    """
    position_BR = state.length[:, None] + offset_R
    text = Text(state.history, state.length, tokens_BR, mask_RR)
    adjusted_BRV = lax.cond(
        state.adjustments.applies(position_BR),
        lambda: adjust(logits_BRV, state.adjustments, text, position_BR, state.eos),
        lambda: logits_BRV,
    )
    chosen_BR = sampling.choose(adjusted_BRV, state.sampling, position_BR)
    scores_BR = lax.cond(
        state.scored,
        lambda: sampling.log_probabilities(logits_BRV, chosen_BR),
        lambda: jnp.zeros(chosen_BR.shape, jnp.float32),
    )
    return chosen_BR, scores_BR
