"""The accelerated residual stream: low-rank accelerators on the frozen weights.

Slow stream: h[0] = embed(token), h[l+1] = block_l(h[l]), the frozen model. Accelerated
stream: p[0] = h[0] + carry, and p[l+1] = block_l(p[l]) through the same weights plus
`(x A) B` on q, o, gate, up and down (arXiv 2502.02040; the carry, the exit maps and the
choice of weights are ours; in mixtures of experts on q and o only). It has queries
only: keys and values are the slow stream's, same layer, positions up to its own, so it
adds nothing to the cache.

The carry is the final state of the token before: a map of it enters the stream where it
starts and again where it ends. The model already said there what comes now, which the
first layers alone cannot know.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn

from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.models.places import low_rank
from m2r2_jax.models.transformer import (
    Rows,
    final_norm,
    layer_weights,
    run_layers,
    with_fast_rows,
)
from m2r2_jax.ops.products import matmul


@dataclasses.dataclass(frozen=True)
class MultiRateConfig:
    """Static description of an accelerated stream.

    Attributes:
      exit_layer: depth X at which the stream is read first; the rate is R = L / X.
      rank: rank r of every accelerator.
      later_exits: deeper exits, rising. Behind each exit the stream is seeded anew
        from the slow one.
    """

    exit_layer: int
    rank: int
    later_exits: tuple[int, ...] = ()

    @property
    def exits(self) -> tuple[int, ...]:
        """All depths at which the stream is read."""
        return (self.exit_layer, *self.later_exits)

    @property
    def intervals(self) -> tuple[tuple[int, int], ...]:
        """First layer and end of each interval between exits."""
        return tuple(zip((0, *self.exits), self.exits, strict=False))

    def validate(self, config: ModelConfig) -> None:
        """Raises ValueError when an exit is not inside the model, or out of order."""
        for lo, hi in self.intervals:
            if not lo < hi <= config.num_layers:
                raise ValueError(
                    f"exit layer {hi} is outside the model or not behind the one "
                    f"before; the model has {config.num_layers} layers, so choose "
                    f"{lo + 1}..{config.num_layers}"
                )
        if self.rank < 1:
            raise ValueError(f"accelerator rank {self.rank} must be at least 1")


class LowRank(nn.Module):
    """One accelerator's pair: `down [..., in, r]` random, `up [..., r, out]` zero."""

    width_in: int
    width_out: int
    rank: int
    stack: tuple[int, ...] = ()

    @nn.compact
    def __call__(self) -> dict:
        init = nn.initializers.normal(self.width_in**-0.5)
        down = (*self.stack, self.width_in, self.rank)
        up = (*self.stack, self.rank, self.width_out)
        return {
            "down": self.param("down", init, down),
            "up": self.param("up", nn.initializers.zeros, up),
        }


class Accelerators(nn.Module):
    """Parameters of the accelerated stream up to its last exit; the maths is below.

    `layers` is stacked over the layers below the last exit; `transformer.unroll` makes
    it a tuple, for models whose blocks are one. `exit` holds, stacked over the exits, a
    map of the stream's own normalised state and one of the carry. `seeds` starts
    the stream anew behind each exit but the last.
    """

    config: ModelConfig
    multirate: MultiRateConfig

    @nn.compact
    def __call__(self) -> dict:
        D, F = self.config.width, self.config.hidden_width
        heads = self.config.num_heads * self.config.head_dim
        sizes = {"q": (D, heads), "o": (heads, D)}
        if self.config.experts is None:
            sizes.update({"gate": (D, F), "up": (D, F), "down": (F, D)})
        rank, exits = self.multirate.rank, self.multirate.exits
        zeros = nn.initializers.zeros
        tree = {
            "layers": {
                name: LowRank(*size, rank, (exits[-1],), name=name)()
                for name, size in sizes.items()
            },
            "carry": self.param("carry", zeros, (D, D)),
            "exit": {
                name: self.param(f"exit_{name}", zeros, (len(exits), D, D))
                for name in ("own", "carry")
            },
        }
        if len(exits) > 1:
            tree["seeds"] = LowRank(D, D, rank, (len(exits) - 1,), name="seeds")()
        return tree


def init_accelerators(
    config: ModelConfig, multirate: MultiRateConfig, key: jax.Array
) -> dict:
    """Accelerators that change nothing yet: every `up` and every map is zero (I1)."""
    multirate.validate(config)
    return Accelerators(config, multirate).init_with_output(key)[0]


def start(
    accelerators: dict, embedded_BTD: jax.Array, state_BTD: jax.Array
) -> jax.Array:
    """Seeds the stream: `p[0] = h[0] + carry`.

    Args:
      accelerators: from `init_accelerators` or training.
      embedded_BTD: h[0] of the tokens.
      state_BTD: normalised final hidden state of each token's predecessor; for a
        drafted predecessor its `exit_state` stands in, in training and decoding.
    """
    return embedded_BTD + matmul(state_BTD, accelerators["carry"])


def seed_again(accelerators: dict, slow_BTD: jax.Array, interval: int) -> jax.Array:
    """The stream behind exit `interval` (from 1): `p = h[X] + low_rank(h[X])`."""
    pair = layer_weights(accelerators["seeds"], interval - 1)
    return slow_BTD + low_rank(pair, slow_BTD)


def exit_state(
    config: ModelConfig,
    params: dict,
    accelerators: dict,
    fast_BTD: jax.Array,
    state_BTD: jax.Array,
    exit: int = 0,
) -> jax.Array:
    """The stream's guess of the normalised final state, from p[X] and the carry.

    Args:
      config: the model.
      params: its parameters.
      accelerators: from `init_accelerators` or training.
      fast_BTD: p[X].
      state_BTD: as given to `start`.
      exit: index of X among the exits.

    Returns:
      What `unembed` and the next drafts' carry read in place of the final state.
    """
    own_BTD = final_norm(config, params, fast_BTD)
    maps = layer_weights(accelerators["exit"], exit)
    moved_BTD = matmul(own_BTD, maps["own"])
    moved_BTD += matmul(state_BTD, maps["carry"])
    return final_norm(config, params, fast_BTD + moved_BTD)


def run_both(
    decoder: Decoder,
    blocks,
    accelerators: dict,
    slow_BTD: jax.Array,
    fast_BTD: jax.Array,
    rows: Rows,
    cache: KVCache | None,
    exit_layer: int,
) -> tuple[jax.Array, jax.Array, KVCache | None]:
    """Runs both streams through the layers below the exit, each weight read once.

    Args:
      decoder: the model, and how it runs.
      blocks: its blocks, unrolled or stacked.
      accelerators: from `init_accelerators` or training.
      slow_BTD: h[0] of T rows.
      fast_BTD: p[0] of the same rows.
      rows: positions and masks of the T rows.
      cache: the slow rows are appended to it (None: uncached).
      exit_layer: X.

    Returns:
      h[X], p[X] and the cache. h and the cache are bitwise what they would be with
      any other accelerators in the same program (I2).
    """
    x_BRD, cache = run_layers(
        decoder,
        blocks,
        jnp.concatenate([slow_BTD, fast_BTD], axis=1),
        with_fast_rows(rows),
        cache,
        0,
        exit_layer,
        accelerators["layers"],
    )
    return x_BRD[:, : rows.slow], x_BRD[:, rows.slow :], cache
