"""A tiny model that chats: byte tokens, two control tokens, a chat template."""

import dataclasses

import jax
import numpy as np
from conftest import TINY, tiny_params, unrolled
from gguf_files import tensors_of, write

from m2r2_jax.checkpoints.gguf import vocabulary_from_gguf
from m2r2_jax.checkpoints.model import Model
from m2r2_jax.text.tokenizer import _BYTES, Tokenizer

# Fillers are ids that no text encodes to: a model may emit them all the same.
_TOKENS = [*_BYTES, "<|im_start|>", "<|im_end|>", "he"]
_TOKENS += [f"filler{i}" for i in range(TINY.vocab_size - len(_TOKENS))]
METADATA = {
    "llama.attention.key_length": TINY.head_dim,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": _TOKENS,
    "tokenizer.ggml.token_type": [1] * 256 + [3, 3] + [1] * (TINY.vocab_size - 258),
    "tokenizer.ggml.merges": ["h e"],
    "tokenizer.ggml.eos_token_id": 257,
    "tokenizer.chat_template": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}


def params(gain: float = 1.0) -> dict:
    """Stacked parameters of a model that ends its turns now and then.

    Args:
      gain: of the blocks' matrices: the larger, the less early layers know.
    """
    tree = tiny_params()
    blocks = {k: w * (gain if w.ndim > 2 else 1.0) for k, w in tree["blocks"].items()}
    return {**tree, "blocks": blocks, "head": tree["head"].at[257].multiply(1.6)}


def chat_model(gain: float = 1.0) -> Model:
    return Model(
        TINY, unrolled(params(gain)), Tokenizer(vocabulary_from_gguf(METADATA))
    )


def write_gguf(path, context_length: int = TINY.context_length):
    """The same model as a file."""
    config = dataclasses.replace(TINY, context_length=context_length)
    tensors = tensors_of(config, jax.tree.map(np.asarray, params()))
    return write(path, config, tensors, metadata=METADATA)
