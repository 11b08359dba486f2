"""`generate`: text in, text out."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from m2r2_jax.methods import build_method
from m2r2_jax.model import Model, load
from m2r2_jax.session import Session

DEFAULT_METHOD = "prompt_lookup"

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Generation:
    """A generated answer with what it took.

    Attributes:
      text: the answer, without control tokens.
      token_ids: emitted ids, the ending one included.
      prompt_tokens: tokens of the rendered prompt.
      finish_reason: "stop" or "length".
      method: decoding method.
      tau: tokens per pass of the full model; None for an empty answer.
      prefill_seconds: wall-clock time of the prompt.
      decode_seconds: wall-clock time of the answer.
    """

    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: str
    method: str
    tau: float | None
    prefill_seconds: float
    decode_seconds: float


def generate(
    prompt: str | Sequence[Message],
    model: Model | None = None,
    *,
    max_new_tokens: int = 256,
    method: str = DEFAULT_METHOD,
    temperature: float = 0.0,
    seed: int = 0,
    details: bool = False,
) -> str | Generation:
    """Generates an answer; prints nothing.

    Args:
      prompt: a user's message, or a conversation of `{"role", "content"}` messages.
        A plain string is completed as it is when the model has no chat template.
      model: from `load`; the default model when None, loaded once per process.
      max_new_tokens: at most this many tokens; fewer where the context ends.
      method: a decoding method of `m2r2_jax.methods.METHODS`; all give the same text.
      temperature: 0 is greedy.
      seed: the same seed gives the same text, whatever the method.
      details: whether to return ids, tau and timings too.

    Returns:
      The text, or a `Generation` when `details` is set.

    Raises:
      ValueError: an empty or over-long prompt, or a setting out of range.
      FileNotFoundError: the default model is not there and cannot be fetched.
    """
    model = _default_model() if model is None else model
    ids = encode_prompt(model, prompt)
    session = Session(model, build_method(method, model))
    (answer,), timing = session.run(
        [ids], max_new_tokens, temperature=temperature, seed=seed
    )
    text = model.tokenizer.decode(answer.token_ids)
    if not details:
        return text
    return Generation(
        text,
        answer.token_ids,
        len(ids),
        answer.finish_reason,
        method,
        answer.tau,
        timing.prefill_seconds,
        timing.decode_seconds,
    )


def encode_prompt(model: Model, prompt: str | Sequence[Message]) -> list[int]:
    """Token ids of a message or a conversation, opened for the model's answer.

    Raises:
      ValueError: an empty prompt, or malformed messages.
    """
    if not isinstance(prompt, str):
        return model.tokenizer.encode_chat(list(prompt))
    if not prompt.strip():
        raise ValueError("the prompt is empty; give at least one visible character")
    if not model.tokenizer.has_chat_template:
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode_chat([{"role": "user", "content": prompt}])


@functools.cache
def _default_model() -> Model:
    return load()
