"""Tests of stop strings: which wins, and that everything is cut at the same token."""

import pytest

from m2r2_jax.serving.answers import Answer, StopStrings


class Letters:
    """A tokenizer whose ids stand for the strings of a list."""

    def __init__(self, *pieces: str):
        self.pieces = pieces

    def has_control(self, text):
        return "<" in text

    def token_bytes(self, ids, *, skip_special):
        pieces = (self.pieces[id] for id in ids)
        return "".join(p for p in pieces if not (skip_special and "<" in p)).encode()


def found(pieces: list[str], stop: list[str], least: int = 0, sizes=(1,)):
    """The cut when the pieces come in blocks of these sizes."""
    results = set()
    for size in {*sizes, 1, 2, 3, len(pieces)}:
        watch = StopStrings(Letters(*pieces), stop, least)
        ids, cut = list(range(len(pieces))), None
        while ids and cut is None:
            block, ids = ids[:size], ids[size:]
            cut = watch.feed(block)
        results.add(cut)
    (only,) = results  # The cut never depends on the blocks.
    return only


@pytest.mark.parametrize(
    ("pieces", "stop", "expected"),
    [
        (["ab", "cd", "ef"], ["cd"], (2, 2)),
        (["ab", "c", "d", "ef"], ["bcd"], (3, 1)),  # Across tokens.
        (["ab", "cdefg", "h"], ["d"], (2, 3)),  # Inside a token.
        (["ab", "cd"], ["x"], None),
        (["abc", "def"], ["cd", "b"], (1, 1)),
        (["a", "bcd", "e"], ["bcde", "cd"], (2, 2)),  # The first that is complete.
        (["a", "bcd", "e"], ["cd", "bcd"], (2, 1)),  # At once: the first that began.
        (["a", "a", "a", "a"], ["aaa"], (3, 0)),
        (["stop at the start", " of a long block"], ["stop"], (1, 0)),
        (["x", "é", "y"], ["é"], (2, 1)),
        (["ab", "<c>", "d"], ["<c>"], (2, 2)),  # A control token, which is not shown.
        (["ab", "<c>", "de", "f"], ["b<c>d"], (3, 1)),
        (["ab", "<c>", "de", "f"], ["bd"], (3, 1)),  # Only shown text counts here.
        (["ab", "<c>", "de"], ["<c>d", "<c>"], (2, 2)),
        (["ab", "<c>", "de"], ["<c>d", "bd"], (3, 1)),
        (["<c>", "<c>", "de"], ["<c><c>d"], (3, 0)),
    ],
)
def test_the_string_complete_first_wins(pieces, stop, expected):
    assert found(pieces, stop) == expected


def test_no_stop_before_the_least_number_of_tokens():
    assert found(["a", "b", "a", "b"], ["b"], least=2) == (4, 3)
    assert found(["a", "b", "a", "a"], ["b"], least=2) is None


def test_a_cut_ends_ids_counts_and_log_probabilities_together():
    answer = Answer(
        [1, 2, 3, 4, 5, 6],
        "length",
        proposed=[4, 4],
        accepted=[3, 1],
        committed=[4, 2],
        logprobs=[-0.1, -0.2, -0.3, -0.4, -0.5, -0.6],
    )
    cut = answer.cut(3, 7)
    assert cut == Answer([1, 2, 3], "stop", [4], [3], [3], [-0.1, -0.2, -0.3], 7)
    assert cut.tau == 3
    assert answer.cut(5, 9).committed == [4, 1]
    assert answer.cut(4, 9).committed == [4]
