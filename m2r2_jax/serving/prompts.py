"""Prompts as token ids: messages and conversations, made to fit the context."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.serving.requests import new_tokens

Message = dict[str, str]


def encode_prompt(model: Model, prompt: str | Sequence[Message]) -> list[int]:
    """Token ids of a message or a conversation, opened for the model's answer.

    Raises:
      ValueError: an empty prompt, or malformed messages.
    """
    prompt = _messages(model, prompt)
    if isinstance(prompt, str):
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode_chat(prompt)


def fitted_prompt(
    model: Model,
    prompt: str | Sequence[Message],
    max_new_tokens: int,
    truncate: str | None,
) -> list[int]:
    """As `encode_prompt`; with truncate="prompt" a conversation gives way by turns.

    The oldest turns are dropped, up to a turn of the user's, and the system's turn is
    kept; where the last turn alone is too long, its beginning is cut. What is too long
    even so, or no conversation, is left to `make_request`.

    Args:
      model: whose context is the limit.
      prompt: a message or a conversation.
      max_new_tokens: for which there has to be room.
      truncate: as for `make_request`.
    """
    room = model.config.context_length - new_tokens(max_new_tokens)
    ids = encode_prompt(model, prompt)
    messages = _messages(model, prompt)
    if truncate != "prompt" or len(ids) <= room or isinstance(messages, str):
        return ids
    encode = model.tokenizer.encode_chat
    shorter = _shorter(messages)
    first = bisect.bisect_left(
        shorter, True, key=lambda some: len(encode(some)) <= room
    )
    if first < len(shorter):
        return encode(shorter[first])
    return _cut_last(model, shorter[-1], room)


def _messages(model: Model, prompt: str | Sequence[Message]) -> str | list[Message]:
    """The prompt as messages, or as text that the model completes."""
    if not isinstance(prompt, str):
        return list(prompt) if isinstance(prompt, Sequence) else prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty; give at least one visible character")
    if not model.tokenizer.has_chat_template:
        return prompt
    return [{"role": "user", "content": prompt}]


def _shorter(messages: list[Message]) -> list[list[Message]]:
    """The conversation without its oldest turns, ever fewer, down to the last turn."""
    is_system = [message["role"] == "system" for message in messages]
    start = is_system.index(False) if False in is_system else len(messages)
    last = max(len(messages) - 1, start)
    return [
        messages[:start] + messages[at:]
        for at in range(start, last + 1)
        if at in (start, last) or messages[at]["role"] == "user"
    ]


def _cut_last(model: Model, messages: list[Message], room: int) -> list[int]:
    """The conversation with the beginning of its last turn cut until it fits."""
    tokenizer = model.tokenizer
    *before, last = messages
    ids = tokenizer.encode_chat(messages)
    content = tokenizer.encode(last["content"])
    # What is left may split into more tokens than it was cut from.
    while len(ids) > room and content and last["role"] != "system":
        content = content[len(ids) - room :]
        text = tokenizer.decode(content).lstrip("\N{REPLACEMENT CHARACTER}")
        ids = tokenizer.encode_chat([*before, {**last, "content": text}])
    return ids
