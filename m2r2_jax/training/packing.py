"""Conversations on disk, and how they are packed into rows for training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from m2r2_jax.files import read_json_lines
from m2r2_jax.training.exchanges import Conversation, Frame

OPENING, PADDING = 0, -1  # Segments; conversations count from 1.


def read_conversations(path: str | Path, tokenizer, frame: Frame) -> list[Conversation]:
    """Reads conversations in file order.

    Args:
      path: a .jsonl or .jsonl.xz file, a folder of them, or a TFDS dataset's folder.
        A row has `prompt` and `response`, or `prompt_ids` and `response_ids`, which
        count more where both are there.
      tokenizer: of the model.
      frame: its chat frame; a finished response ends with the bridge's first id.

    Raises:
      FileNotFoundError: nothing to read there.
      ValueError: a row that is not a conversation, or has ids outside the vocabulary.
    """
    conversations = []
    for where, row in _rows(Path(path)):
        try:
            conversations.append(_conversation(row, tokenizer, frame))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{where} is not a conversation ({error!r}); a row needs "
                '{"prompt": ..., "response": ...}'
            ) from error
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    return conversations


def _conversation(row: dict, tokenizer, frame: Frame) -> Conversation:
    finished = row.get("finished", True)
    if not isinstance(finished, bool):
        raise ValueError(f"finished is {finished!r:.40}, neither true nor false")
    prompt = _given_ids(row, "prompt_ids", tokenizer.vocab_size)
    answer = _given_ids(row, "response_ids", tokenizer.vocab_size)
    return Conversation(
        prompt or tokenizer.encode(row["prompt"]),
        answer or [*tokenizer.encode(row["response"]), *frame.bridge[: int(finished)]],
        finished,
    )


def _given_ids(row: dict, name: str, vocab_size: int) -> list[int]:
    """Ids that a row spells out; none where its text has them."""
    ids = row.get(name) or []
    if not isinstance(ids, list):
        raise ValueError(f"{name} is {ids!r:.40}, not a list of ids")
    for id in ids:
        if type(id) is not int or not 0 <= id < vocab_size:
            raise ValueError(
                f"{name} holds {id!r:.40}; the vocabulary has the ids "
                f"0..{vocab_size - 1}"
            )
    return ids


def as_row(conversation: Conversation, tokenizer, frame: Frame) -> dict:
    """How a conversation is stored: text, and ids where encoding would not meet them.

    `read_conversations` gives the conversation back exactly.
    """
    row: dict = {"finished": conversation.finished}
    end = list(frame.bridge[: int(conversation.finished)])
    for name, ids, ending in (
        ("prompt", conversation.prompt_ids, []),
        ("response", conversation.answer_ids, end),
    ):
        row[name] = tokenizer.decode(ids)
        if [*tokenizer.encode(row[name]), *ending] != ids:
            row[f"{name}_ids"] = ids
    return row


def _rows(path: Path) -> Iterator[tuple[str, dict]]:
    """Rows, and what each is called in errors."""
    if (path / "dataset_info.json").is_file():
        from m2r2_jax.training.dataset import read_rows

        yield from _named(path, read_rows(path))
        return
    files = [path] if path.is_file() else sorted(path.glob("**/*.jsonl*"))
    if not files:
        raise FileNotFoundError(f"no .jsonl file and no dataset at {str(path)!r}")
    for file in files:
        yield from _named(file, read_json_lines(file))


def _named(file: Path, rows: Iterator[dict]) -> Iterator[tuple[str, dict]]:
    for number, row in enumerate(rows, 1):
        yield f"{file}, row {number}", row


@dataclasses.dataclass(frozen=True)
class Packed:
    """Conversations side by side in rows of equal length.

    A row starts with the chat template's opening, which all of its conversations read
    as if each stood alone behind it: the template is computed once a row, and
    positions count on from it for each.

    Attributes:
      tokens: `int32[N, T]`.
      segment: `int16[N, T]`: `OPENING`, 1.. for conversations, `PADDING`.
      position: `int32[N, T]`, as it would be for the conversation alone.
      trained: `bool[N, T]`: tokens behind which a draft is learned: where the next
        token is the conversation's own, and not the template's.
    """

    tokens: np.ndarray
    segment: np.ndarray
    position: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def pack(
    conversations: Sequence[Conversation], frame: Frame, length: int, seed: int
) -> Packed:
    """Packs conversations as `arrange` has them, cut at the end of their row."""
    return fill(arrange(conversations, frame, length, seed), frame, length)


def arrange(
    conversations: Sequence[Conversation], frame: Frame, length: int, seed: int
) -> list[list[Conversation]]:
    """Which conversations share a row: shuffled, first row with room first.

    Args:
      conversations: to pack; those without prompt or answer are left out.
      frame: the chat frame.
      length: T.
      seed: of the order.
    """
    room = length - len(frame.opening)
    if room <= len(frame.bridge):
        raise ValueError(f"rows of {length} tokens have no room for a conversation")
    rows: list[list[Conversation]] = []
    left: list[int] = []
    open_rows: list[int] = []
    for index in np.random.default_rng(seed).permutation(len(conversations)):
        conversation = conversations[index]
        if not conversation.prompt_ids or not conversation.answer_ids:
            continue
        size = min(room, len(_body(conversation, frame)[0]))
        row = next((row for row in open_rows if left[row] >= size), None)
        if row is None:
            row = len(rows)
            rows.append([])
            left.append(room)
            open_rows.append(row)
        rows[row].append(conversation)
        left[row] -= size
        open_rows = [row for row in open_rows[-64:] if left[row] > len(frame.bridge)]
    return rows


def _body(conversation: Conversation, frame: Frame) -> tuple[list[int], list[bool]]:
    """Ids behind the opening, and behind which of them a draft is learned."""
    prompt, answer = conversation.prompt_ids, conversation.answer_ids
    ids = [*prompt, *frame.bridge, *answer]
    trained = np.ones(len(ids), bool)
    # The last of the prompt and all but the last of the bridge come before the
    # template's tokens; what follows the answer's end is nobody's.
    trained[len(prompt) - 1 : len(prompt) + len(frame.bridge) - 1] = False
    trained[-1] = False
    return ids, trained.tolist()


def fill(rows: list[list[Conversation]], frame: Frame, length: int) -> Packed:
    """Rows of conversations as arrays."""
    shape, opening = (len(rows), length), len(frame.opening)
    tokens = np.zeros(shape, np.int32)
    segment = np.full(shape, PADDING, np.int16)
    position = np.zeros(shape, np.int32)
    trained = np.zeros(shape, bool)
    tokens[:, :opening] = frame.opening
    segment[:, :opening] = OPENING
    position[:, :opening] = np.arange(opening)
    for row, conversations in enumerate(rows):
        at = opening
        for number, conversation in enumerate(conversations, 1):
            ids, learn = _body(conversation, frame)
            end = min(at + len(ids), length)
            size = end - at
            tokens[row, at:end] = ids[:size]
            segment[row, at:end] = number
            position[row, at:end] = opening + np.arange(size)
            trained[row, at:end] = learn[:size]
            at = end
        trained[row, length - 1] = False
    return Packed(tokens, segment, position, trained)


def in_answers(packed: Packed) -> np.ndarray:
    """Trained tokens whose next one is an answer's, and not a prompt's: `bool[N, T]`.

    Between the two stand tokens that are not trained: the template's.
    """
    found = np.zeros_like(packed.trained)
    for row, segment in enumerate(packed.segment):
        for number in range(1, segment.max() + 1):
            here = np.flatnonzero(segment == number)
            trained = packed.trained[row, here]
            found[row, here] = trained & np.logical_or.accumulate(~trained)
    return found


def rank_tokens(conversations: Sequence[Conversation], vocab_size: int) -> np.ndarray:
    """All ids by how often the model's own text has them, commonest first: `[V]`.

    Equal counts keep the order of the ids, which byte-pair encoding gives by rank.
    """
    answers = [conversation.answer_ids for conversation in conversations]
    counts = np.bincount(np.concatenate(answers), minlength=vocab_size)
    return np.argsort(-counts, kind="stable").astype(np.int32)


def fingerprint(packed: Packed) -> str:
    """A digest of packed rows, so that labels are never taken for other text's."""
    digest = hashlib.sha256(packed.tokens.tobytes())
    digest.update(packed.segment.tobytes())
    return digest.hexdigest()
