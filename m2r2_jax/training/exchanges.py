"""Exchanges of one user turn and one answer, as ids inside their chat template."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Labels:
    """What the model thought behind each token of some ids, in order.

    Attributes:
      states: bf16 `[n, D]`, normalised final states.
      argmax: `int32[n]`, the most likely next ids.
    """

    states: np.ndarray
    argmax: np.ndarray


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One exchange.

    Attributes:
      prompt_ids: the user turn, without the template's tokens.
      answer_ids: the answer, its ending id included when it has one.
      finished: whether the answer came to its own end; False where it was cut.
      labels: of the prompt, the template's ids behind it and the answer but its last
        id, which the model that wrote it has not read; None where they were not kept.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    finished: bool
    labels: Labels | None = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True)
class Frame:
    """The chat template around a user turn, as ids.

    Attributes:
      opening: everything before the user's first token.
      bridge: everything between the user's last token and the answer's first.
    """

    opening: tuple[int, ...]
    bridge: tuple[int, ...]


def chat_frame(tokenizer) -> Frame:
    """Reads the frame off the template by rendering a marked user turn.

    Raises:
      ValueError: the template does not show the user's text once and unchanged.
    """
    mark = "@@user@@"
    text = tokenizer.render([{"role": "user", "content": mark}])
    if text.count(mark) != 1:
        raise ValueError(
            "the chat template does not repeat a user turn once and unchanged, so no "
            "turn can be written after its opening; give prompts with their answers"
        )
    parts = (tokenizer.encode(part, special=True) for part in text.split(mark))
    return Frame(*map(tuple, parts))
