"""Metrics of decoding, from per-round counts; pure functions of what was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

NGRAM, LOOP_COUNT = 8, 3


def loop_start(token_ids: Sequence[int]) -> int:
    """Tokens up to the end of the first 8-gram that appears a third time.

    What follows is counted as a loop: a small greedy model repeats itself, and copied
    or predicted repetitions would inflate tau.
    """
    seen: Counter = Counter()
    for end in range(NGRAM, len(token_ids) + 1):
        ngram = tuple(token_ids[end - NGRAM : end])
        seen[ngram] += 1
        if seen[ngram] == LOOP_COUNT:
            return end
    return len(token_ids)


def rounds_within(committed: Sequence[int], tokens: int) -> tuple[int, int]:
    """Whole rounds inside the first `tokens` tokens, and the tokens they emitted."""
    emitted = 0
    for rounds, count in enumerate(committed):
        if emitted + count > tokens:
            return rounds, emitted
        emitted += count
    return len(committed), emitted


def tau(answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, loops: bool):
    """Tokens per pass of the full model over many answers, its own token included.

    Args:
      answers: (token ids, tokens emitted in each round) of each answer.
      loops: whether to count what follows `loop_start` too.

    Returns:
      The ratio of the sums, or None when there was no pass.
    """
    total_rounds = total_tokens = 0
    for token_ids, committed in answers:
        within = len(token_ids) if loops else loop_start(token_ids)
        rounds, tokens = rounds_within(committed, within)
        total_rounds += rounds
        total_tokens += tokens
    return total_tokens / total_rounds if total_rounds else None


def acceptance_by_position(
    proposed: Sequence[int], accepted: Sequence[int]
) -> list[float]:
    """Conditional acceptance: of the rounds that proposed a draft at position i and
    accepted all before it, the share that accepted it too; i = 1, 2, ...
    """
    rates = []
    for position in range(1, max(proposed, default=0) + 1):
        reached = [
            accept
            for propose, accept in zip(proposed, accepted, strict=True)
            if propose >= position and accept >= position - 1
        ]
        if not reached:
            break
        rates.append(sum(accept >= position for accept in reached) / len(reached))
    return rates


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first token in which two answers differ; None if they are equal."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))
