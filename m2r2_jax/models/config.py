"""Static description of a model. Families differ by fields, never by code paths."""

from __future__ import annotations

import dataclasses

from m2r2_jax.ops.execution import PLAIN, Execution


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder of the Llama family; hashable, hence static.

    Attributes:
      name: what tables and records call the model.
      vocab_size: rows of the embedding (V).
      num_layers: transformer blocks (L).
      width: residual width (D).
      hidden_width: width inside the gated MLP (F).
      num_heads: query heads (N), a multiple of `num_kv_heads`.
      num_kv_heads: key and value heads (K).
      head_dim: width of a head (H), even.
      rope_theta: base of the rotary angles.
      norm_epsilon: added to the mean square in RMSNorm.
      tied_head: whether the unembedding is the embedding.
      context_length: positions the model was trained for.
    """

    name: str
    vocab_size: int
    num_layers: int
    width: int
    hidden_width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    norm_epsilon: float
    tied_head: bool
    context_length: int

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} "
                "key/value heads evenly; num_heads must be a multiple of num_kv_heads"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim {self.head_dim} is odd; rotary embedding turns pairs"
            )

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head (G)."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model and how it is run: what programs are compiled for.

    Attributes:
      config: the model.
      execution: how this device multiplies; plain products by default, as in training.
    """

    config: ModelConfig
    execution: Execution = PLAIN
