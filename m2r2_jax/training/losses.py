"""What a draft costs: losses of exit states against the teacher's.

Three parts a token: the divergence of the draft's distribution from the teacher's over
the draft head's ids, the chance that a draft is refused (1 - sum min(p, q), exact under
sampling), and the distance of the exit state from the teacher's (cosine, and squares in
units of the teacher's).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from m2r2_jax.drafters.draft_head import DraftHead

_TOKENS_PER_PIECE = 512
_PARTS = ("divergence", "refused", "distance", "agreement")


@struct.dataclass
class Batch:
    """Packed rows with their labels; see `packing.Packed` and `labels.LabelStore`.

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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def draft_losses(
    weights: tuple[float, float],
    head: DraftHead,
    states_EBTD: jax.Array,
    batch: Batch,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Losses of E exits and draft steps, means over the trained tokens.

    Args:
      weights: of the overlap and of the alignment loss; the divergence has 1.
      head: over whose ids drafts and teacher are compared.
      states_EBTD: exit states; the only argument with a gradient.
      batch: labels.

    Returns:
      Losses `[E]`, and their parts by name, `[E]` each, which have no gradient.
    """
    return _forward(weights, head, states_EBTD, batch)[0]


def _forward(weights, head, states_EBTD, batch):
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
            losses_E, parts = _piece_losses(weights, head, states_EBtD, *labels)
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


def _backward(weights, saved, cotangents):
    del weights  # They are in the gradients already.
    grads_EBTD, head, batch = saved
    weight_E = cotangents[0].reshape(-1, 1, 1, 1)
    nothing = jax.tree.map(_no_gradient, (head, batch))
    return nothing[0], grads_EBTD * weight_E, nothing[1]


draft_losses.defvjp(_forward, _backward)


def _no_gradient(value):
    if jnp.issubdtype(value.dtype, jnp.floating):
        return jnp.zeros_like(value)
    return np.zeros(value.shape, jax.dtypes.float0)


def _piece_losses(weights, head, states_EBtD, teacher_BtD, argmax_Bt, trained_Bt):
    """Sums over the trained tokens of a piece: losses `[E]`, and their parts."""
    overlap, alignment = weights
    teacher_BtD = teacher_BtD.astype(jnp.float32)
    target_BtH = jax.nn.log_softmax(head.logits(teacher_BtD))
    logits_EBtH = head.logits(states_EBtD)
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
        parts["divergence"] + overlap * parts["refused"] + alignment * parts["distance"]
    )
    return losses_E, parts
