"""What a drafter is: the fixed shape of its rounds, what it is shown, what it proposes.

`loop.decode` calls it; a new one needs nothing else of this package.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.models.cache import KVCache
from m2r2_jax.models.config import Decoder


@dataclasses.dataclass(frozen=True)
class Layout:
    """The fixed shape of a round's rows: a tree whose row 0 is the root token.

    Attributes:
      parent: parent row of each row, smaller than the row itself; -1 for the root.
    """

    parent: tuple[int, ...]

    def __post_init__(self):
        ordered = all(0 <= p < i for i, p in enumerate(self.parent) if i)
        if not self.parent or self.parent[0] != -1 or not ordered:
            raise ValueError(
                f"layout parents {self.parent} are not a tree: row 0 must have parent "
                "-1 and every other row a parent before it"
            )

    @classmethod
    def chain(cls, length: int) -> Layout:
        """The root followed by `length` drafts in a line.

        Raises:
          ValueError: fewer than one draft.
        """
        if length < 1:
            raise ValueError(f"draft length {length} must be at least 1")
        return cls(tuple(range(-1, length)))

    def at_least(self, rows: int) -> Layout:
        """The layout with rows behind its last one until there are so many."""
        return Layout(self.parent + tuple(range(self.size - 1, rows - 1)))

    @property
    def size(self) -> int:
        """Rows of a round, the root included (n)."""
        return len(self.parent)

    @cached_property
    def offset(self) -> np.ndarray:
        """Depth of each row, hence its position relative to the root's: `int[n]`."""
        depth = np.zeros(self.size, np.int32)
        for row, parent in enumerate(self.parent[1:], start=1):
            depth[row] = depth[parent] + 1
        return depth

    @cached_property
    def mask(self) -> np.ndarray:
        """Which rows a row may read: its ancestors and itself, `bool[n, n]`."""
        mask = np.eye(self.size, dtype=bool)
        for row, parent in enumerate(self.parent[1:], start=1):
            mask[row] |= mask[parent]
        return mask

    @cached_property
    def path(self) -> np.ndarray:
        """Rows from the root to each row, in order, then padding: `int[n, n]`."""
        path = np.zeros((self.size, self.size), np.int32)
        for row in range(self.size):
            ancestors = np.flatnonzero(self.mask[row])
            path[row, : len(ancestors)] = ancestors
        return path

    @property
    def is_chain(self) -> bool:
        """Whether accepted rows already lie in contiguous slots."""
        return self.parent == tuple(range(-1, self.size - 1))


@struct.dataclass
class Proposal:
    """What a drafter proposes.

    Attributes:
      tokens: `int32[B, n]`; row 0 is the root.
      valid: `bool[B, n]`; an invalid row is never accepted, nor are its descendants.
      hidden: states at the drafter's start layer, `[B, n, D]`; None when it is 0.
    """

    tokens: jax.Array
    valid: jax.Array
    hidden: jax.Array | None = None

    def at_least(self, rows: int) -> Proposal:
        """The proposal with repeated, invalid rows until there are so many."""
        missing = rows - self.tokens.shape[1]
        if missing <= 0:
            return self

        def pad(array, mode):
            widths = [(0, 0), (0, missing)] + [(0, 0)] * (array.ndim - 2)
            return jnp.pad(array, widths, mode=mode)

        hidden = None if self.hidden is None else pad(self.hidden, "edge")
        return Proposal(pad(self.tokens, "edge"), pad(self.valid, "constant"), hidden)


@struct.dataclass
class Prefill:
    """What is known once the prompt has been read.

    Attributes:
      history: `int32[B, S]`, garbage behind `length`.
      length: `int32[B]`, tokens in the history; the last one is the root.
      hidden: normalised final state of the token before the root, `[B, D]`.
    """

    history: jax.Array
    length: jax.Array
    hidden: jax.Array


@struct.dataclass
class Context:
    """What a drafter may look at.

    Attributes:
      history: `int32[B, S]`, garbage behind `length`.
      length: `int32[B]`, tokens in the history; the last one is the root.
      root: `int32[B]`.
      cache: holds the positions before the root; its scratch slots may be written.
      sampling: adding the model's own noise to draft logits raises acceptance.
    """

    history: jax.Array
    length: jax.Array
    root: jax.Array
    cache: KVCache
    sampling: Sampling


@struct.dataclass
class Outcome:
    """What verification found, for the drafter's own state.

    Attributes:
      hidden: normalised final states of the round's rows, `[B, n, D]`.
      path: rows that were kept, in order, root first; `int32[B, n]`.
      count: how many of them count, `int32[B]`; 0 for a row that was done before.
    """

    hidden: jax.Array
    path: jax.Array
    count: jax.Array


class Drafter(Protocol):
    """A drafter: hashable, static, with pure methods.

    `decoder` is the model that verifies, and how it runs; `params` holds "model", its
    parameters, and whatever the drafter was given beside it.
    """

    @property
    def layout(self) -> Layout:
        """The fixed layout of its rounds."""

    @property
    def start_layer(self) -> int:
        """Verification begins at this layer: those below it have been run by the
        drafter, which hands their states over and has written their keys and values.
        """

    def init(self, decoder: Decoder, params: dict, prefill: Prefill) -> Any:
        """Its state after prefill."""

    def propose(
        self, decoder: Decoder, params: dict, state: Any, context: Context
    ) -> tuple[Proposal, Any, KVCache]:
        """Drafts one round."""

    def update(
        self, decoder: Decoder, params: dict, state: Any, outcome: Outcome
    ) -> Any:
        """Its state after a round."""
