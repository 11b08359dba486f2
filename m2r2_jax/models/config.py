"""Static description of a model. Families differ by fields, never by code paths."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

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

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, object], *, tied_head: bool, vocab_size: int
    ) -> ModelConfig:
        """Reads the config from GGUF metadata.

        Args:
          metadata: GGUF keys to plain values.
          tied_head: whether the file has no `output.weight`.
          vocab_size: rows of `token_embd.weight`; the vocabulary list may be shorter.

        Raises:
          ValueError: for an architecture or rotary scaling that is not supported, or
            a missing key.
        """
        architecture = metadata.get("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"GGUF architecture {architecture!r} is not supported; supported: llama"
            )
        if "llama.expert_count" in metadata:
            raise ValueError("Mixture-of-Experts GGUF files are not supported yet")
        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(
                f"rotary scaling {scaling!r} is not supported; supported: none"
            )

        def get(key: str):
            if (value := metadata.get(f"llama.{key}")) is None:
                raise ValueError(f"GGUF metadata has no key 'llama.{key}'")
            return value

        num_heads, width = get("attention.head_count"), get("embedding_length")
        return cls(
            name=str(metadata.get("general.name", "unnamed")),
            vocab_size=vocab_size,
            num_layers=get("block_count"),
            width=width,
            hidden_width=get("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=metadata.get("llama.attention.head_count_kv", num_heads),
            head_dim=metadata.get("llama.attention.key_length", width // num_heads),
            rope_theta=metadata.get("llama.rope.freq_base", 10_000.0),
            norm_epsilon=get("attention.layer_norm_rms_epsilon"),
            tied_head=tied_head,
            context_length=get("context_length"),
        )


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model and how it is run: what programs are compiled for.

    Attributes:
      config: the model.
      execution: how this device multiplies; plain products by default, as in training.
    """

    config: ModelConfig
    execution: Execution = PLAIN
