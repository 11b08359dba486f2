"""Static description of a model. Families differ by fields, never by code paths."""

from __future__ import annotations

import dataclasses

from m2r2_jax.models.rotary import Rope, Scaling
from m2r2_jax.ops.execution import PLAIN, Execution

_CHOICES = {
    "norms": ("before", "after", "both"),
    "qk_norm": (None, "head", "projection"),
    "activation": ("silu", "gelu_tanh"),
}


@dataclasses.dataclass(frozen=True)
class Experts:
    """A layer's MLP as a mixture of experts, chosen per token by a router.

    Attributes:
      count: experts of a layer (E).
      per_token: how many of them a token has.
      renormalise: whether their weights sum to one; else they are their parts of the
        softmax over all experts.
      shared_width: width inside an expert that every token has, weighted by a sigmoid
        of its own gate; 0 for none.
    """

    count: int
    per_token: int
    renormalise: bool
    shared_width: int = 0

    def __post_init__(self):
        if not 0 < self.per_token <= self.count:
            raise ValueError(
                f"{self.per_token} experts a token cannot be chosen from {self.count}"
            )


@dataclasses.dataclass(frozen=True)
class LayerKind:
    """What differs between layers of one model.

    Attributes:
      window: keys a query sees, its own included; 0 is all.
      rope: how queries and keys are turned.
    """

    window: int
    rope: Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and constants of a decoder-only transformer; hashable, hence static.

    The defaults are the Llama family's; a feature that is off costs nothing.

    Attributes:
      name: what tables and records call the model.
      vocab_size: rows of the embedding (V).
      num_layers: transformer blocks (L).
      width: residual width (D).
      hidden_width: width inside the gated MLP, or one expert's (F).
      num_heads: query heads (N), a multiple of `num_kv_heads`.
      num_kv_heads: key and value heads (K).
      head_dim: width of a head (H), even.
      rope_theta: base of the rotary angles.
      norm_epsilon: added to the mean square in RMSNorm.
      tied_head: whether the unembedding is the embedding.
      context_length: positions the model can be used with.
      decodable: ids below it have a text, and only they are chosen; rows of the
        embedding may be more. None is all.
      rope_scaling: of the rotary frequencies, in layers without a window.
      rotary_dim: dimensions of a head that are turned; None is all.
      windows: of each layer, the keys a query sees, its own included, or 0 for all;
        empty where no layer has a window.
      window_rope_theta: `rope_theta` of layers with a window, which then are not
        scaled; None where all layers are turned alike.
      norms: where a block's norms stand: "before" attention and MLP, "after" them and
        before the residual sum, or "both".
      qk_norm: whether queries and keys are normalised, each "head" by itself or the
        whole "projection"; None for neither.
      biases: names among "qkv", "out", "gate_up", "down" of products that add a bias.
      activation: of the gate, a name of `layers.ACTIVATIONS`.
      attention_scale: what scores are multiplied by; None is `head_dim**-0.5`.
      attention_cap: soft cap of the scores.
      logit_cap: soft cap of the logits.
      embed_multiplier: of the embedded tokens. It is rounded to their dtype, as the
        models' own releases do: 33.94 is 34 in bf16.
      residual_multiplier: of what attention and MLP add to the stream.
      logit_multiplier: of the logits, before their cap.
      experts: the MLPs as mixtures of experts; None where they are dense.
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
    decodable: int | None = None
    rope_scaling: Scaling | None = None
    rotary_dim: int | None = None
    windows: tuple[int, ...] = ()
    window_rope_theta: float | None = None
    norms: str = "before"
    qk_norm: str | None = None
    biases: tuple[str, ...] = ()
    activation: str = "silu"
    attention_scale: float | None = None
    attention_cap: float | None = None
    logit_cap: float | None = None
    embed_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_multiplier: float = 1.0
    experts: Experts | None = None

    def __post_init__(self):
        if self.decodable is not None and self.decodable >= self.vocab_size:
            # One form for models whose every row has a text.
            object.__setattr__(self, "decodable", None)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} "
                "key/value heads evenly; num_heads must be a multiple of num_kv_heads"
            )
        for name in ("head_dim", "rotary_dim"):
            if (getattr(self, name) or 0) % 2:
                raise ValueError(
                    f"{name} {getattr(self, name)} is odd; rotary embedding turns pairs"
                )
        if len(self.windows) not in (0, self.num_layers):
            raise ValueError(
                f"{len(self.windows)} windows for {self.num_layers} layers; give one "
                "for each layer, or none"
            )
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown; choose from {known}"
                )

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one key/value head (G)."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of layers this model has, in order of first appearance."""
        return tuple(dict.fromkeys(map(self._kind, range(self.num_layers))))

    @property
    def kind_of_layer(self) -> tuple[int, ...]:
        """Each layer's index into `layer_kinds`."""
        kinds = self.layer_kinds
        return tuple(kinds.index(self._kind(layer)) for layer in range(self.num_layers))

    def _kind(self, layer: int) -> LayerKind:
        window = self.windows[layer] if self.windows else 0
        theta, scaling = self.rope_theta, self.rope_scaling
        if window and self.window_rope_theta is not None:
            theta, scaling = self.window_rope_theta, None
        size = self.head_dim, self.context_length, self.rotary_dim
        return LayerKind(window, Rope(theta, *size, scaling))


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A model and how it is run: what programs are compiled for.

    Attributes:
      config: the model.
      execution: how this device multiplies; plain products by default, as in training.
    """

    config: ModelConfig
    execution: Execution = PLAIN
