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
      settled: characters that no stop string can take back; None where all are.
    """

    token_ids: list[int]
    finish_reason: str
    proposed: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    committed: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] | None = None
    stopped_at: int | None = None
    settled: int | None = None

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
    the one that began first. A string in which a control token is spelled is looked
    for in the text with control tokens, the others in the text that is shown.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_new_tokens: int):
        self._min_new_tokens, self._count, self._shown = min_new_tokens, 0, 0
        self._decoder = StreamDecoder(tokenizer)
        spelt = [string for string in stop if tokenizer.has_control(string)]
        others = [string for string in stop if string not in spelt]
        self._texts = [
            _Text(StreamDecoder(tokenizer, skip_special=skip), strings)
            for skip, strings in ((True, others), (False, spelt))
            if strings
        ]
        self._where: tuple[int, int] | None = None

    def apply(self, answer: Answer) -> Answer:
        """The answer, cut once a stop string is complete in what it has grown to."""
        if not self._texts:
            return answer
        if self._where is None:
            self._where = self.feed(answer.token_ids[self._count :])
        if self._where is not None:
            return answer.cut(*self._where)
        places = (text.beginning() for text in self._texts)
        settled = min((p for p in places if p is not None), default=self._shown)
        return dataclasses.replace(answer, settled=settled)

    def feed(self, ids: Iterable[int]) -> tuple[int, int] | None:
        """Takes new tokens.

        Returns:
          How many tokens the answer keeps and how many characters stand before the
          stop string, once one is complete; else None.
        """
        for id in ids:
            before = self._shown
            self._shown += len(self._decoder.push([id]))
            self._count += 1
            ends = [
                end
                for text in self._texts
                for end in text.push(id, before, self._shown)
            ]
            if ends and self._count > self._min_new_tokens:
                return self._count, min(ends)[1]
        return None


class _Text:
    """A text as it grows, and the strings that are looked for in it.

    Places count the characters that are shown, whichever the text holds.
    """

    def __init__(self, decoder: StreamDecoder, strings: Sequence[str]):
        self._decoder, self._strings = decoder, strings
        self._text = ""
        self._place: list[int] = []

    def push(self, id: int, shown_before: int, shown: int) -> list[tuple[int, int]]:
        """Places of the end and the start of each string that this token completes."""
        old = len(self._text)
        self._text += self._decoder.push([id])
        fresh = range(len(self._text) - old)
        self._place += [min(shown_before + index, shown) for index in fresh]
        found = []
        for string in self._strings:
            start = self._text.find(string, max(0, old - len(string) + 1))
            if start >= 0:
                last = start + len(string) - 1
                found.append((self._place[last], self._place[start]))
        return found

    def beginning(self) -> int | None:
        """Place from which the text may be the beginning of a string."""
        longest = max(map(len, self._strings)) - 1
        for size in range(min(longest, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-size:]) for s in self._strings):
                return self._place[-size]
        return None
