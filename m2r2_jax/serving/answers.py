"""What a row of a run produced, and where its stop strings cut it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from m2r2_jax.text.tokenizer import StreamDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one row of a run produced.

    Attributes:
      token_ids: emitted ids, the one included that ended the answer.
      finish_reason: "stop" at an end-of-sequence id or a stop string, "length" at the
        limit.
      proposed: drafts proposed in each round (empty for plain decoding).
      accepted: drafts accepted in each round, before any cut.
      committed: tokens emitted in each round.
      logprobs: log-probability of each id, when asked for.
      stopped_at: characters before the stop string; None where none was met.
    """

    token_ids: list[int]
    finish_reason: str
    proposed: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    committed: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] | None = None
    stopped_at: int | None = None

    @property
    def tau(self) -> float | None:
        """Tokens per pass of the full model, its own token included; None if none."""
        return len(self.token_ids) / len(self.committed) if self.committed else None

    def text(self, tokenizer: Tokenizer) -> str:
        """The answer without control tokens and without its stop string."""
        return tokenizer.decode(self.token_ids)[: self.stopped_at]

    def cut(self, count: int, stopped_at: int) -> Answer:
        """The first `count` tokens: ids, counts and log-probabilities end together."""
        committed, left = [], count
        for emitted in self.committed:
            if left == 0:
                break
            committed.append(min(emitted, left))
            left -= committed[-1]
        rounds = len(committed)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:count],
            finish_reason="stop",
            proposed=self.proposed[:rounds],
            accepted=self.accepted[:rounds],
            committed=committed,
            logprobs=self.logprobs and self.logprobs[:count],
            stopped_at=stopped_at,
        )


class StopStrings:
    """Looks for stop strings in one answer as its tokens come.

    The string that is complete first wins; among those complete at the same character,
    the one that began first.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_new_tokens: int):
        self._stop, self._min_new_tokens = tuple(stop), min_new_tokens
        self._decoder = StreamDecoder(tokenizer)
        self._text, self._count = "", 0
        self._where: tuple[int, int] | None = None

    def apply(self, answer: Answer) -> Answer:
        """The answer, cut once a stop string is complete in what it has grown to."""
        if self._stop and self._where is None:
            self._where = self.feed(answer.token_ids[self._count :])
        return answer if self._where is None else answer.cut(*self._where)

    def feed(self, ids: Iterable[int]) -> tuple[int, int] | None:
        """Takes new tokens.

        Returns:
          How many tokens the answer keeps and how many characters stand before the
          stop string, once one is complete; else None.
        """
        for id in ids:
            before = len(self._text)
            self._text += self._decoder.push([id])
            self._count += 1
            if self._count > self._min_new_tokens and (cut := self._found(before)):
                return self._count, cut[1]
        return None

    def _found(self, before: int) -> tuple[int, int] | None:
        """End and start of the first stop string that ends behind `before`."""
        ends = []
        for stop in self._stop:
            start = self._text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                ends.append((start + len(stop), start))
        return min(ends, default=None)
