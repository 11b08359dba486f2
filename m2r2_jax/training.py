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
import numpy as np
import optax
import optax.contrib
from flax import struct
from jax import lax

from m2r2_jax import multirate, transformer
from m2r2_jax.cache import init_cache
from m2r2_jax.config import ModelConfig
from m2r2_jax.data import PADDING
from m2r2_jax.labels import packed_rows
from m2r2_jax.layers import linear
from m2r2_jax.multirate import DraftHead, MultiRateConfig

_TOKENS_PER_PIECE = 512
_PARTS = ("divergence", "refused", "distance", "agreement")


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


@struct.dataclass
class Batch:
    """Packed rows with their labels; see `data.Packed` and `labels.LabelStore`.

    Attributes:
      tokens: `int32[B, T]`.
      segment: `int16[B, T]`.
      position: `int32[B, T]`.
      trained: `bool[B, T]`.
      states: `[B, T, D]`, the teacher's normalised final states.
      argmax: `int32[B, T]`, the teacher's most likely next ids.
    """

    tokens: jax.Array
    segment: jax.Array
    position: jax.Array
    trained: jax.Array
    states: jax.Array
    argmax: jax.Array


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
      head: from `multirate.draft_head`.
      state: donated.
      batch: packed rows.

    Returns:
      The state, and `loss` with its parts and the arg-max agreement of each draft step.
    """

    def loss(accelerators):
        # Products run in the dtype of the model's matrices, updates in f32.
        cast = multirate.like_matrices(params, accelerators)
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
        drafted_BT = head.ids[jnp.argmax(linear(state_BTD, head.weight), axis=-1)]
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
    losses_E, parts = _draft_losses(train, head, states_EBTD, batch)
    metrics = {
        f"{name}/{key}": value[index]
        for index, (name, _) in enumerate(names)
        for key, value in parts.items()
    }
    total = losses_E @ jnp.asarray([weight for _, weight in names])
    return total, {"loss": total, **metrics}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _draft_losses(train, head: DraftHead, states_EBTD, batch: Batch):
    """Losses `[E]` of E exits and draft steps, and their parts."""
    return _draft_losses_forward(train, head, states_EBTD, batch)[0]


def _draft_losses_forward(train, head, states_EBTD, batch):
    """Loss and gradient in one sweep over pieces of the rows.

    A piece's logits over the draft head stay in the processor's cache; differentiated
    as a whole, the logits of all tokens would pass through memory a dozen times.
    """
    pieces = max(1, batch.tokens.size // _TOKENS_PER_PIECE)
    while batch.tokens.shape[1] % pieces:
        pieces -= 1
    count = jnp.maximum(jnp.sum(batch.trained), 1)

    def cut(value, axis):
        width = value.shape[axis] // pieces
        shape = (*value.shape[:axis], pieces, width, *value.shape[axis + 1 :])
        return jnp.moveaxis(value.reshape(shape), axis, 0)

    def piece(sums, inputs):
        states_EBtD, *labels = inputs

        def loss(states_EBtD):
            losses_E, parts = _piece_losses(train, head, states_EBtD, *labels)
            return jnp.sum(losses_E) / count, (losses_E, parts)

        grads, found = jax.grad(loss, has_aux=True)(states_EBtD)
        return jax.tree.map(jnp.add, sums, found), grads

    labels = (batch.states, batch.argmax, batch.trained)
    inputs = (cut(states_EBTD, 2), *(cut(label, 1) for label in labels))
    zeros_E = jnp.zeros(len(states_EBTD))
    sums = (zeros_E, dict.fromkeys(_PARTS, zeros_E))
    sums, grads = lax.scan(piece, sums, inputs)
    grads_EBTD = jnp.moveaxis(grads, 0, 2).reshape(states_EBTD.shape)
    return jax.tree.map(lambda total: total / count, sums), (grads_EBTD, head, batch)


def _draft_losses_backward(train, saved, cotangents):
    grads_EBTD, head, batch = saved
    weight_E = cotangents[0].reshape(-1, 1, 1, 1)
    nothing = jax.tree.map(_no_gradient, (head, batch))
    return nothing[0], grads_EBTD * weight_E, nothing[1]


_draft_losses.defvjp(_draft_losses_forward, _draft_losses_backward)


def _no_gradient(value):
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)


def _piece_losses(train, head, states_EBtD, teacher_BtD, argmax_Bt, trained_Bt):
    """Sums over the trained tokens of a piece: losses `[E]`, and their parts."""
    teacher_BtD = _f32(teacher_BtD)
    target_BtH = jax.nn.log_softmax(linear(teacher_BtD, head.weight))
    logits_EBtH = linear(states_EBtD, head.weight)
    draft_EBtH = jax.nn.log_softmax(logits_EBtH)
    p_BtH = jnp.exp(target_BtH)
    divergence_EBt = jnp.sum(p_BtH * (target_BtH - draft_EBtH), axis=-1)
    overlap_EBt = jnp.sum(jnp.minimum(p_BtH, jnp.exp(draft_EBtH)), axis=-1)
    size_Bt = jnp.sum(jnp.square(teacher_BtD), axis=-1)
    own_size_EBt = jnp.sum(jnp.square(states_EBtD), axis=-1)
    product_EBt = jnp.sum(states_EBtD * teacher_BtD, axis=-1)
    cosine_EBt = product_EBt * lax.rsqrt(size_Bt * own_size_EBt + 1e-6)
    squares_EBt = size_Bt + own_size_EBt - 2 * product_EBt
    # Cheaper than an arg-max: whether the teacher's choice has the largest logit.
    slot_Bt = head.slot[argmax_Bt]
    own_EBt = jnp.take_along_axis(
        logits_EBtH, jnp.maximum(slot_Bt, 0)[None, ..., None], axis=-1
    )[..., 0]
    agrees_EBt = (slot_Bt >= 0) & (own_EBt >= jnp.max(logits_EBtH, axis=-1))

    def total(value_EBt):
        return jnp.sum(value_EBt * trained_Bt, axis=(1, 2))

    parts = {
        "divergence": total(divergence_EBt),
        "refused": total(1 - overlap_EBt),
        "distance": total(1 - cosine_EBt + squares_EBt / (size_Bt + 1e-6)),
        "agreement": total(agrees_EBt),
    }
    losses_E = (
        parts["divergence"]
        + train.overlap * parts["refused"]
        + train.alignment * parts["distance"]
    )
    return losses_E, parts


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
    project = multirate.accelerated(accelerators["layers"], 0)

    def read(interval, fast_BTD, carried_BTD):
        lo, hi = rates.intervals[interval]
        fast_BTD, _ = transformer.run_layers(
            config, params["blocks"], fast_BTD, rows, cache, lo, hi, project
        )
        return multirate.exit_state(
            config, params, accelerators, fast_BTD, carried_BTD, interval
        )

    teacher_BTD = previous(batch, _f32(batch.states))
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
    x_BTD = transformer.embed(params, batch.tokens)
    unrolled = isinstance(params["blocks"], tuple)
    cache = init_cache(config, B, T, x_BTD.dtype, unrolled=unrolled)
    starts = []
    for lo, hi in rates.intervals:
        starts.append(x_BTD)
        x_BTD, cache = transformer.run_layers(
            config, params["blocks"], x_BTD, rows, cache, lo, hi
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


def _f32(states):
    return states.astype(jnp.float32)
