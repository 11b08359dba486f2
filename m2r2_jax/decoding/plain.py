"""Plain decoding: prefill in chunks, then one jitted loop `state -> state`.

The state of a loop is one pytree, donated, so that the cache is updated in place.
The last token of a row (the root) is never in the cache yet: after a prompt as after
every step, the cache holds exactly the positions before it (I9).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.decoding import sampling
from m2r2_jax.decoding.sampling import BROKEN, Adjustments, Sampling, Text
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.ops import compilation

PREFILL_CHUNK = 256  # Rows per prefill call at most: bounds the attention scores.
_SMALLEST_BUCKET = 16


@struct.dataclass
class DecodeState:
    """Everything a decoding loop carries.

    Attributes:
      cache: keys and values of all positions but the root's.
      history: `int32[B, S]` token ids, prompt then answer; garbage behind `length`.
      limit: `int32[B]`, the length at which a row must stop.
      done: `bool[B]`.
      eos: `int32[E]`, the ids that end an answer; may be empty.
      sampling: how tokens are drawn.
      adjustments: what is changed in their logits before.
      scored: `bool[]`, whether log-probabilities are computed.
      scores: `f32[B, S]`, those of the tokens in the history; zero where not computed.
    """

    cache: KVCache
    history: jax.Array
    limit: jax.Array
    done: jax.Array
    eos: jax.Array
    sampling: Sampling
    adjustments: Adjustments
    scored: jax.Array
    scores: jax.Array

    @property
    def length(self) -> jax.Array:
        """Tokens in `history`, the root included: `int32[B]`."""
        return self.cache.length + 1

    @property
    def root(self) -> jax.Array:
        """The last token of each row: `int32[B]`."""
        return jnp.take_along_axis(self.history, self.cache.length[:, None], 1)[:, 0]


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
    compilation.jit, static_argnames=("config",), donate_argnames=("cache",)
)
def prefill(
    config: ModelConfig,
    params: dict,
    cache: KVCache,
    hidden_BD: jax.Array,
    tokens_BC: jax.Array,
    count_B: jax.Array,
) -> tuple[KVCache, jax.Array]:
    """Appends one chunk of prompt tokens to the cache.

    Args:
      config: the model.
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
    rows = transformer.cached_rows(config, cache, jnp.arange(C), causal_CC)
    x_BCD, cache = transformer.run_layers(
        config,
        params["blocks"],
        transformer.embed(params, tokens_BC),
        rows,
        cache,
        0,
        config.num_layers,
    )
    last_B = jnp.maximum(count_B - 1, 0)
    x_BD = jnp.take_along_axis(x_BCD, last_B[:, None, None], axis=1)[:, 0]
    fresh_BD = transformer.final_norm(config, params, x_BD)
    hidden_BD = jnp.where(count_B[:, None] > 0, fresh_BD, hidden_BD)
    return cache.advance(count_B), hidden_BD


@functools.partial(
    compilation.jit, static_argnames=("config", "rows"), donate_argnames=("state",)
)
def decode(
    config: ModelConfig, params: dict, state: DecodeState, steps: jax.Array, rows: int
) -> DecodeState:
    """Decodes until every row is done or `steps` tokens were emitted.

    Args:
      config: the model.
      params: an argument, not a constant, so that programs are shared between models.
      state: donated.
      steps: `int32[]`, at most this many steps; streaming calls in chunks.
      rows: rows per step and sequence. 1 is fastest; 2, with exact products in the
        config, is the exact mode, in which f32 results are bitwise those of
        draft-verify decoding.
    """

    def unfinished(carry):
        state, step = carry
        return (step < steps) & ~jnp.all(state.done)

    def step(carry):
        state, step = carry
        return _plain_step(config, params, state, rows), step + 1

    return lax.while_loop(unfinished, step, (state, jnp.int32(0)))[0]


def _plain_step(
    config: ModelConfig, params: dict, state: DecodeState, rows: int
) -> DecodeState:
    tokens_BR = jnp.tile(state.root[:, None], (1, rows))
    offset_R, mask_RR = np.arange(rows), np.tri(rows, dtype=bool)
    _, logits_BRV, cache = score(
        config, params, state.cache, tokens_BR, offset_R, mask_RR
    )
    chosen = choose_next(
        state, logits_BRV[:, :1], tokens_BR[:, :1], offset_R[:1], mask_RR[:1, :1]
    )
    one_B = jnp.ones_like(state.length)
    return emit(state.replace(cache=cache), *chosen, one_B)[0]


def score(
    config: ModelConfig,
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
      config: the model.
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
    rows = transformer.cached_rows(config, cache, offset_R, mask_RR)
    x_BRD = transformer.embed(params, tokens_BR) if start_layer == 0 else hidden_BRD
    x_BRD, cache = transformer.run_layers(
        config, params["blocks"], x_BRD, rows, cache, start_layer, config.num_layers
    )
    x_BRD = transformer.final_norm(config, params, x_BRD)
    return x_BRD, transformer.unembed(config, params, x_BRD), cache


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
        lambda: sampling.adjust(
            logits_BRV, state.adjustments, text, position_BR, state.eos
        ),
        lambda: logits_BRV,
    )
    chosen_BR = sampling.choose(adjusted_BRV, state.sampling, position_BR)
    scores_BR = lax.cond(
        state.scored,
        lambda: sampling.log_probabilities(logits_BRV, chosen_BR),
        lambda: jnp.zeros(chosen_BR.shape),
    )
    return chosen_BR, scores_BR


def emit(
    state: DecodeState,
    tokens_Bn: jax.Array,
    scores_Bn: jax.Array,
    count_B: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """Appends the first `count` tokens of each row, cut at EOS and at the limit.

    A broken token (`sampling.BROKEN`) ends its row too; the host raises an error.

    Args:
      state: its cache holds the new root's predecessors in its scratch slots.
      tokens_Bn: verified tokens.
      scores_Bn: their log-probabilities.
      count_B: how many of them are to be emitted.

    Returns:
      The state, with history and cache advanced by the same count, and that count.
    """
    index_n = jnp.arange(tokens_Bn.shape[1])
    is_end_Bn = jnp.any(tokens_Bn[..., None] == state.eos, axis=-1)
    is_end_Bn |= tokens_Bn == BROKEN
    count_B = jnp.minimum(count_B, state.limit - state.length)
    count_B = jnp.where(state.done, 0, count_B)
    ends_Bn = is_end_Bn & (index_n < count_B[:, None])
    ended_B = jnp.any(ends_Bn, axis=-1)
    count_B = jnp.where(ended_B, jnp.argmax(ends_Bn, axis=-1) + 1, count_B)
    cache = state.cache.advance(count_B.astype(jnp.int32))
    state = state.replace(
        history=_write_behind(state.history, tokens_Bn, state.length),
        scores=_write_behind(state.scores, scores_Bn, state.length),
        cache=cache,
        done=state.done | ended_B | (cache.length + 1 >= state.limit),
    )
    return state, count_B


def _write_behind(values_BS, new_Bn, start_B):
    """Writes all n values from `start` on; those behind the count stay unread."""

    def row(values_S, new_n, start):
        return lax.dynamic_update_slice(values_S, new_n, (start,))

    return jax.vmap(row)(values_BS, new_Bn, start_B)
