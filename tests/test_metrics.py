"""Metrics on hand-written counts."""

from experiments import metrics


def test_loop_starts_after_the_third_appearance_of_an_8_gram():
    phrase = list(range(8))
    assert metrics.loop_start(phrase * 2 + [9]) == 17
    assert metrics.loop_start([99] + phrase * 3 + [9]) == 25


def test_overlapping_appearances_count():
    assert metrics.loop_start([5] * 40) == 10


def test_rounds_within_counts_whole_rounds_only():
    assert metrics.rounds_within([3, 4, 2], 9) == (3, 9)
    assert metrics.rounds_within([3, 4, 2], 8) == (2, 7)
    assert metrics.rounds_within([3, 4, 2], 0) == (0, 0)


def test_tau_is_the_ratio_of_sums_and_includes_the_bonus_token():
    answers = [(list(range(9)), [3, 4, 2]), (list(range(3)), [1, 1, 1])]
    assert metrics.tau(answers, loops=True) == 12 / 6


def test_tau_without_loops_leaves_out_what_follows_the_loop():
    looping = [5] * 40
    answers = [(looping, [2] * 5 + [10] * 3)]
    assert metrics.tau(answers, loops=True) == 40 / 8
    assert metrics.tau(answers, loops=False) == 10 / 5


def test_tau_of_nothing_is_none():
    assert metrics.tau([([], [])], loops=True) is None


def test_acceptance_is_conditional_on_all_drafts_before():
    proposed, accepted = [3, 3, 3, 0, 1], [3, 1, 0, 0, 1]
    assert metrics.acceptance_by_position(proposed, accepted) == [3 / 4, 1 / 2, 1.0]


def test_acceptance_ends_where_no_round_got():
    assert metrics.acceptance_by_position([2, 2], [0, 0]) == [0.0]
    assert metrics.acceptance_by_position([], []) == []


def test_first_difference():
    assert metrics.first_difference([1, 2, 3], [1, 2, 3]) is None
    assert metrics.first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert metrics.first_difference([1, 2], [1, 2, 3]) == 2
