"""Training of the accelerated stream: losses, and one pure step `state -> state`.

The base model is frozen; the teacher's final states are stored (`labels`). The stream
is unrolled on its own drafts ("training-time test", as in EAGLE-3, arXiv 2503.01840):
in draft step 1 the carry is the teacher's state of the token before, in step s > 1 the
stream's own exit state of draft step s - 1 there, exactly as in decoding.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from flax import struct
from jax import lax

from m2r2_jax.drafters.draft_head import DraftHead
from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.models.layers import argmax
from m2r2_jax.models.multirate import MultiRateConfig
from m2r2_jax.training.labels import packed_rows
from m2r2_jax.training.losses import Batch, draft_losses
from m2r2_jax.training.packing import PADDING


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """How the accelerators are trained.

    Attributes:
      steps: optimizer steps in all; the learning rate falls over the last fifth.
      learning_rate: of Muon, after the warm-up; in the same measure as Adam's.
      warmup: steps over which it rises.
      draft_steps: how far the stream is unrolled on its own drafts (S).
      draft_decay: weight of each draft step's loss relative to the one before.
      overlap: weight of 1 - sum(min(p, q)), the chance that a draft is refused.
      alignment: weight of the distance between the exit's state and the teacher's.
    """

    steps: int
    learning_rate: float = 4e-3
    warmup: int = 20
    draft_steps: int = 3
    draft_decay: float = 0.8
    overlap: float = 1.0
    alignment: float = 0.1

    def __post_init__(self):
        if self.steps < 1 or self.draft_steps < 1:
            raise ValueError(
                f"steps {self.steps} and draft_steps {self.draft_steps} must be at "
                "least 1"
            )

    def optimizer(self) -> optax.GradientTransformation:
        """Muon under a warm-up, a plateau and a linear decay."""
        decay = max(1, self.steps // 5)
        schedule = optax.join_schedules(
            [
                optax.linear_schedule(0.0, self.learning_rate, self.warmup),
                optax.constant_schedule(self.learning_rate),
                optax.linear_schedule(self.learning_rate, 0.0, decay),
            ],
            [self.warmup, self.steps - decay],
        )
        return optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.contrib.muon(
                schedule,
                muon_weight_dimension_numbers=_matrices,
                # Steps as large as Adam's, whatever a matrix's shape.
                consistent_rms=0.2,
            ),
        )


def _matrices(params: dict):
    """Every parameter is a matrix, or a stack of them, `[..., in, out]`."""
    return jax.tree.map(
        lambda leaf: optax.contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1),
        params,
    )


@struct.dataclass
class TrainState:
    """What a step changes: trainable parameters, moments, the number of steps done."""

    accelerators: dict
    moments: optax.OptState
    step: jax.Array


def init_state(
    config: ModelConfig, rates: MultiRateConfig, train: TrainConfig, key: jax.Array
) -> TrainState:
    """The state before the first step."""
    accelerators = multirate.init_accelerators(config, rates, key)
    return TrainState(accelerators, train.optimizer().init(accelerators), jnp.int32(0))


@functools.partial(
    jax.jit,
    static_argnames=("config", "rates", "train"),
    donate_argnames=("state",),
)
def train_step(
    config: ModelConfig,
    rates: MultiRateConfig,
    train: TrainConfig,
    params: dict,
    head: DraftHead,
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimizer step on the accelerators alone (I3).

    Args:
      config: the model.
      rates: exits and rank.
      train: loss weights and schedule.
      params: the frozen model, blocks unrolled or stacked.
      head: from `draft_head.draft_head`.
      state: donated.
      batch: packed rows.

    Returns:
      The state, and `loss` with its parts and the arg-max agreement of each draft step.
    """

    def loss(accelerators):
        # Products run in the dtype of the model's matrices, updates in f32.
        cast = transformer.like_matrices(params, accelerators)
        return _loss(config, rates, train, params, head, cast, batch)

    gradients, metrics = jax.grad(loss, has_aux=True)(state.accelerators)
    updates, moments = train.optimizer().update(
        gradients, state.moments, state.accelerators
    )
    accelerators = optax.apply_updates(state.accelerators, updates)
    return TrainState(accelerators, moments, state.step + 1), metrics


@functools.partial(jax.jit, static_argnames=("config", "rates", "draft_steps"))
def acceptance_counts(
    config: ModelConfig,
    rates: MultiRateConfig,
    draft_steps: int,
    params: dict,
    head: DraftHead,
    accelerators: dict,
    batch: Batch,
) -> jax.Array:
    """Chains of greedy drafts that are accepted up to each position.

    A chain starts at every trained token, and runs as in greedy decoding: its i-th
    draft is right iff all before it were and it is the teacher's choice.

    Returns:
      `int32[S + 1]`: chains that could have reached position i, of which entry i + 1
      counts those accepted there; entry 0 is all chains.
    """
    exits = exit_states(config, rates, draft_steps, params, accelerators, batch)[0]
    alive_BT = batch.trained
    counts = [jnp.sum(alive_BT)]
    for step, state_BTD in enumerate(exits):
        drafted_BT = head.ids[argmax(head.logits(state_BTD))]
        right_BT = (drafted_BT == batch.argmax) & batch.trained
        # The chain that began `step` tokens earlier is judged here.
        alive_BT = right_BT & (alive_BT if step == 0 else previous(batch, alive_BT))
        counts.append(jnp.sum(alive_BT))
    return jnp.stack(counts)


def _loss(config, rates, train, params, head, accelerators, batch):
    """The weighted sum over exits and draft steps, and its parts by name."""
    by_exit = exit_states(config, rates, train.draft_steps, params, accelerators, batch)
    names = [
        (f"exit{exit}/draft{step + 1}", train.draft_decay**step)
        for exit, states in zip(rates.exits, by_exit, strict=True)
        for step in range(len(states))
    ]
    states_EBTD = jnp.stack([state for states in by_exit for state in states])
    losses_E, parts = draft_losses(
        (train.overlap, train.alignment), head, states_EBTD, batch
    )
    metrics = {
        f"{name}/{key}": value[index]
        for index, (name, _) in enumerate(names)
        for key, value in parts.items()
    }
    total = losses_E @ jnp.asarray([weight for _, weight in names])
    return total, {"loss": total, **metrics}


def exit_states(config, rates, draft_steps, params, accelerators, batch):
    """Exit states `[B, T, D]`: for each exit a list over draft steps.

    Only the first exit drafts: the others are read once, at draft step 1.
    """
    rows = packed_rows(config, batch.segment, batch.position)
    slow, cache = _slow_stream(config, rates, params, batch, rows)
    # The slow stream depends on nothing that is trained.
    slow, cache = lax.stop_gradient((slow, cache))
    # Fast rows alone: the slow ones have run, their keys are in the cache.
    rows = rows.replace(slow=0)

    def read(interval, fast_BTD, carried_BTD):
        lo, hi = rates.intervals[interval]
        fast_BTD, _ = transformer.run_layers(
            Decoder(config),
            params["blocks"],
            fast_BTD,
            rows,
            cache,
            lo,
            hi,
            accelerators["layers"],
        )
        return multirate.exit_state(
            config, params, accelerators, fast_BTD, carried_BTD, interval
        )

    teacher_BTD = previous(batch, batch.states.astype(jnp.float32))
    carried_BTD, drafts = teacher_BTD, []
    for _ in range(draft_steps):
        fast_BTD = multirate.start(accelerators, slow[0], carried_BTD)
        drafts.append(read(0, fast_BTD, carried_BTD))
        carried_BTD = previous(batch, drafts[-1])
    later = [
        [read(i, multirate.seed_again(accelerators, slow[i], i), teacher_BTD)]
        for i in range(1, len(rates.exits))
    ]
    return [drafts, *later]


def slow_exits(config, rates, params, batch: Batch) -> list[jax.Array]:
    """h at every exit: `[B, T, D]` each."""
    rows = packed_rows(config, batch.segment, batch.position)
    return _slow_stream(config, rates, params, batch, rows)[0][1:]


def _slow_stream(config, rates, params, batch, rows):
    """h at every interval's start and at the end, and the slow keys and values."""
    B, T = batch.tokens.shape
    x_BTD = transformer.embed(config, params, batch.tokens)
    unrolled = isinstance(params["blocks"], tuple)
    cache = init_cache(config, B, T, x_BTD.dtype, unrolled=unrolled)
    starts = []
    for lo, hi in rates.intervals:
        starts.append(x_BTD)
        x_BTD, cache = transformer.run_layers(
            Decoder(config), params["blocks"], x_BTD, rows, cache, lo, hi
        )
    return [*starts, x_BTD], cache


def previous(batch: Batch, value_BT):
    """Each token's predecessor's value; behind the opening all segments begin anew.

    The predecessor of a segment's first token is the opening's last one.
    """
    moved = jnp.roll(value_BT, 1, axis=1)
    before_BT = jnp.roll(batch.segment, 1, axis=1)
    begins_BT = (batch.segment != before_BT) & (batch.segment != PADDING)
    last_B = jnp.sum(batch.segment == 0, axis=1) - 1
    index = last_B.reshape(-1, *(1,) * (value_BT.ndim - 1))
    opening = jnp.take_along_axis(value_BT, index, axis=1)
    begins = begins_BT.reshape(*begins_BT.shape, *(1,) * (value_BT.ndim - 2))
    return jnp.where(begins, opening, moved)
