"""Test-only drafters that are told the true continuation, and where to be wrong.

`params["script"]` holds, all traced, so that every script shares one program:
  truth: `int32[B, S]`, the whole text, prompt included.
  pick: `int32[P]`, by position modulo P, which of the siblings at a depth holds the
    true token; NONE of them, or ALL.
  proposed: `int32[P]`, by length modulo P, the greatest depth that is proposed.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from m2r2_jax.decoding.drafting import Context, Layout, Prefill, Proposal

NONE, ALL = -1, -2


def script(truths: list[list[int]], pick=(0,), proposed=(99,)) -> dict:
    """Parameters of a scripted drafter; behind its end the truth is token 0."""
    truth = np.zeros((len(truths), 300), np.int32)
    for row, ids in enumerate(truths):
        truth[row, : len(ids)] = ids
    # One size for all patterns, which repeat: 420 is a multiple of 1 to 7.
    pick, proposed = (np.resize(np.int32(x), 420) for x in (pick, proposed))
    return {"script": {"truth": truth, "pick": pick, "proposed": proposed}}


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Proposes the truth down one path of a layout, and other tokens elsewhere.

    Its state is the final state of the token before the root, as a drafter with a
    carry would keep it, so that tests can check what `update` is told.
    """

    layout: Layout
    start_layer = 0

    def init(self, decoder, params: dict, prefill: Prefill) -> jax.Array:
        return prefill.hidden

    def propose(self, decoder, params: dict, state: jax.Array, context: Context):
        told, rows = params["script"], np.arange(self.layout.size)
        position_Bn = context.length[:, None] - 1 + self.layout.offset
        truth_Bn = jnp.take_along_axis(told["truth"], position_Bn, axis=1)
        pick_Bn = told["pick"][position_Bn % 420]
        right_Bn = (pick_Bn == self._rank) | (pick_Bn == ALL) | (rows == 0)
        wrong_Bn = (truth_Bn + 1 + rows) % decoder.config.vocab_size
        tokens_Bn = jnp.where(right_Bn, truth_Bn, wrong_Bn).astype(jnp.int32)
        deepest_B = told["proposed"][context.length % 420]
        valid_Bn = self.layout.offset <= deepest_B[:, None]
        tokens_Bn = tokens_Bn.at[:, 0].set(context.root)
        return Proposal(tokens_Bn, valid_Bn), state, context.cache

    def update(self, decoder, params: dict, state: jax.Array, outcome):
        last_B1 = jnp.maximum(outcome.count - 1, 0)[:, None]
        row_B1 = jnp.take_along_axis(outcome.path, last_B1, axis=1)
        kept_BD = jnp.take_along_axis(outcome.hidden, row_B1[..., None], axis=1)[:, 0]
        return jnp.where(outcome.count[:, None] > 0, kept_BD, state)

    @property
    def _rank(self) -> np.ndarray:
        """Of each row, how many siblings come before it."""
        parents = self.layout.parent
        return np.array([parents[:row].count(p) for row, p in enumerate(parents)])


def accepted_depths(start: int, end: int, pick, proposed, depth: int) -> list[int]:
    """Drafts accepted in each round of a scripted chain, by the script alone.

    Args:
      start: length of the prompt.
      end: length of the whole text.
      pick: the script's.
      proposed: the script's.
      depth: length of the chain.
    """
    rounds, length = [], start
    while length < end:
        longest = min(depth, proposed[length % len(proposed)])
        right = [pick[(length + i) % len(pick)] != NONE for i in range(longest)]
        rounds.append((right + [False]).index(False))
        length += rounds[-1] + 1
    return rounds
