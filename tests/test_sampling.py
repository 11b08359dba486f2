"""Tests of the draw, its filters and adjustments, against plain numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2r2_jax.decoding import sampling
from m2r2_jax.decoding.adjustments import FORBIDDEN, Adjustments, Text, adjust
from m2r2_jax.decoding.sampling import BROKEN, NOTHING, Sampling
from m2r2_jax.decoding.settings import SamplingParams

choose = jax.jit(sampling.choose)
filtered = jax.jit(sampling.filtered)
adjust = jax.jit(adjust)
V = 12
LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2


def softmax(logits):
    weights = np.exp(np.float64(logits) - np.max(logits))
    return weights / weights.sum()


def reference(logits, params: SamplingParams):
    """The filtered distribution, token by token."""
    order = np.argsort(-logits, kind="stable")
    kept = list(order[: params.top_k or None])
    chance = softmax(logits[kept])
    before = np.cumsum(chance) - chance
    kept = [i for i, b in zip(kept, before, strict=True) if b < params.top_p] or [
        order[0]
    ]
    best = softmax(logits)[order[0]]
    kept = [i for i in kept if softmax(logits)[i] >= params.min_p * best]
    found = np.zeros(len(logits))
    found[kept] = softmax(logits[kept])
    return found


FILTERS = [
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 400},
    {"top_p": 0.7},
    {"top_p": 0.0},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.1},
    {},
]


@pytest.mark.parametrize("settings", FILTERS, ids=str)
def test_filters_keep_what_numpy_keeps(settings):
    params = SamplingParams(temperature=1.0, **settings)
    kept = filtered(LOGITS[None, None], Sampling.stack([params]))[0, 0]
    expected = reference(LOGITS, params)
    np.testing.assert_allclose(softmax(kept), expected, atol=1e-6)


def test_tokens_as_likely_as_the_last_kept_one_are_kept():
    logits = np.array([1.0, 3.0, 2.0, 2.0, 0.0], np.float32)
    how = Sampling.stack([SamplingParams(temperature=1.0, top_k=2)])
    kept = filtered(logits[None, None], how)[0, 0] > FORBIDDEN
    np.testing.assert_array_equal(kept, [False, True, True, True, False])


@pytest.mark.parametrize("settings", [FILTERS[0], FILTERS[3], FILTERS[6], {}], ids=str)
@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_draws_follow_the_filtered_distribution(settings, temperature):
    """100,000 draws: as close as draws of numpy's own, give or take."""
    draws = 100_000
    params = SamplingParams(temperature=temperature, seed=3, **settings)
    rows = jnp.broadcast_to(LOGITS, (1, draws, V))
    chosen = choose(rows, Sampling.stack([params]), jnp.arange(draws)[None])
    found = np.bincount(np.ravel(chosen), minlength=V) / draws
    expected = reference(LOGITS / np.float32(temperature), params)
    distance = np.abs(found - expected).sum() / 2
    rng = np.random.default_rng(0)
    own = [
        np.abs(rng.multinomial(draws, expected) / draws - expected).sum() / 2
        for _ in range(200)
    ]
    assert distance <= np.max(own)
    assert not found[expected == 0].any()


def test_tiny_temperatures_are_greedy_on_every_path():
    for temperature in (0.0, 1e-6, 1e-40):
        how = Sampling.stack([SamplingParams(temperature=temperature, seed=9)])
        chosen = choose(LOGITS[None, None], how, jnp.array([[4]]))
        assert chosen[0, 0] == LOGITS.argmax()


def test_rows_keep_their_own_settings_beside_others():
    rows = jnp.broadcast_to(LOGITS, (3, 60, V))
    position = jnp.broadcast_to(jnp.arange(60), (3, 60))
    params = [
        SamplingParams(temperature=1.0, top_k=2, seed=5),
        SamplingParams(),
        SamplingParams(temperature=1.5, seed=5, min_p=0.05),
    ]
    together = choose(rows, Sampling.stack(params), position)
    for row, own in enumerate(params):
        alone = choose(rows[:1], Sampling.stack([own]), position[:1])
        np.testing.assert_array_equal(together[row], alone[0])


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, FILTERS[6]], ids=str)
def test_logits_with_a_nan_choose_nothing(settings):
    logits = np.stack([LOGITS, LOGITS])
    logits[1, 7] = np.nan
    params = SamplingParams(**{"temperature": 0.0, **settings})
    position = jnp.array([[4, 5]])
    chosen = choose(logits[None], Sampling.stack([params]), position)
    assert chosen[0, 0] >= 0 and chosen[0, 1] == BROKEN


HISTORY = [3, 3, 5, 1, 2, 1]  # A prompt of three, and an answer up to the root.
DRAFTS = [1, 7, 4]  # The root, and a draft in each of two branches.
MASK = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)


def adjusted(**settings):
    """Logits of three rows behind the history, `[3, V]`."""
    params = SamplingParams(**settings)
    history = np.zeros((1, 16), np.int32)
    history[0, : len(HISTORY)] = HISTORY
    history[0, len(HISTORY) :] = 9  # Garbage, which must not count.
    text = Text(history, np.array([6]), np.array([DRAFTS]), MASK)
    position = np.array([[6, 7, 7]])
    rows = np.stack([LOGITS, LOGITS + 1, -LOGITS])
    eos = np.array([0, 11], np.int32)
    prepared = Adjustments.stack([params], [3])
    assert bool(prepared.applies(position)) == bool(settings)
    return rows, np.asarray(adjust(rows[None], prepared, text, position, eos))[0]


# What each row's text holds: the answer's tokens so far, with its own draft.
ANSWERS = [[1, 2, 1], [1, 2, 1, 7], [1, 2, 1, 4]]


def test_penalties_see_the_answer_and_the_drafts_of_their_own_branch():
    rows, found = adjusted(presence_penalty=0.5, frequency_penalty=0.25)
    for logits, result, answer in zip(rows, found, ANSWERS, strict=True):
        count = np.bincount(answer, minlength=V)
        expected = logits - 0.5 * (count > 0) - 0.25 * count
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_repetition_penalty_sees_the_prompt_too():
    rows, found = adjusted(repetition_penalty=1.5)
    for logits, result, answer in zip(rows, found, ANSWERS, strict=True):
        expected = logits.copy()
        for id in {3, 5, *answer}:
            expected[id] *= 1 / 1.5 if logits[id] > 0 else 1.5
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_biases_are_added_and_early_ends_are_not_chosen():
    rows, found = adjusted(logit_bias={4: 2.0, 8: -np.inf}, min_new_tokens=4)
    expected = rows.copy()
    expected[:, 4] += 2
    expected[:, 8] = FORBIDDEN
    # Position 6 would be the fourth token of the answer, 7 the fifth.
    expected[0, [0, 11]] = FORBIDDEN
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": dict.fromkeys(range(V), -np.inf)},
        {"logit_bias": dict.fromkeys(range(V), -1e9)},
        {"logit_bias": dict.fromkeys(range(1, 11), -np.inf), "min_new_tokens": 4},
    ],
    ids=["infinite", "large", "ends"],
)
@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 3}], ids=str)
def test_where_all_is_forbidden_nothing_is_chosen(settings, how):
    _, found = adjusted(**settings)
    drawn = Sampling.stack([SamplingParams(**how)])
    assert choose(found[None], drawn, jnp.array([[6, 7, 7]]))[0, 0] == NOTHING


def test_the_largest_penalties_overflow_nothing():
    most = {"presence_penalty": -1e6, "frequency_penalty": 1e6}
    for factor in (1e-6, 1e6):
        _, found = adjusted(repetition_penalty=factor, logit_bias={1: -np.inf}, **most)
        assert np.isfinite(found).all()


def test_seeds_of_32_bits_draw_what_jax_random_key_draws():
    """Texts of earlier versions stay what they are."""
    for seed in (0, 7, 2**31 - 1):
        how = Sampling.stack([SamplingParams(temperature=1.0, seed=seed)])
        key = jax.random.fold_in(jax.random.key(seed), 4)
        expected = np.argmax(LOGITS + jax.random.gumbel(key, (V,)))
        assert choose(LOGITS[None, None], how, jnp.array([[4]]))[0, 0] == expected


def texts_of(*seeds: int) -> list[list[int]]:
    rows = [SamplingParams(temperature=2.0, seed=seed) for seed in seeds]
    logits = jnp.broadcast_to(LOGITS, (len(seeds), 40, V))
    position = jnp.broadcast_to(jnp.arange(40), (len(seeds), 40))
    return choose(logits, Sampling.stack(rows), position).tolist()


def test_all_64_bits_of_a_seed_count():
    one, high, low, last, negative = texts_of(5, 5 + 2**32, 6, 2**64 - 1, -1)
    assert one != high and one != low
    assert negative == last


def test_a_seed_of_none_is_a_fresh_one_that_can_be_read():
    first, second = SamplingParams(seed=None), SamplingParams(seed=None)
    assert first.seed != second.seed
    assert texts_of(first.seed, first.seed)[0] == texts_of(first.seed)[0]


def test_prompts_of_a_batch_have_seeds_of_their_own():
    params = SamplingParams(temperature=1.0, seed=2**63)
    seeds = [params.for_prompt(index).seed for index in range(1000)]
    assert seeds[0] == params.seed and len(set(seeds)) == 1000
    assert params.for_prompt(3).temperature == 1.0
    assert SamplingParams(seed=seeds[1] + 2**62).seed == seeds[1] + 2**62


def test_numbers_may_be_numpys():
    given = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        seed=np.uint64(2**63),
        logit_bias={np.int64(4): np.float32(1.5)},
    )
    same = SamplingParams(temperature=0.5, top_k=3, seed=2**63, logit_bias={4: 1.5})
    assert given == same
    assert [type(id) for id in given.logit_bias] == [int]


def test_log_probabilities_are_the_models_own():
    found = sampling.log_probabilities(LOGITS[None, None], jnp.array([[3]]))
    assert found[0, 0] == pytest.approx(np.log(softmax(LOGITS)[3]), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.5}, r"temperature -0\.5 must be 0 \(greedy\) or more"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": "hot"}, "temperature 'hot'"),
        ({"top_k": -1}, "top_k -1 must be 0"),
        ({"top_k": 2.5}, "top_k 2.5 must be an integer"),
        ({"top_p": 1.5}, "top_p 1.5 must be from 0 to 1"),
        ({"min_p": -0.1}, "min_p -0.1"),
        ({"temperature": 1e39}, "at most 1e"),
        ({"top_k": True}, "top_k True must be an integer"),
        ({"top_p": True}, "top_p True must be from 0 to 1"),
        ({"seed": 2**64}, r"seed 18446744073709551616 must be of 64 bits, -2\*\*63"),
        ({"seed": -(2**63) - 1}, "or None for a fresh one"),
        ({"seed": "7"}, "seed '7' must be an integer, of 64 bits"),
        ({"seed": 1.0}, "seed 1.0 must be an integer"),
        ({"repetition_penalty": 1e39}, "repetition_penalty 1e.39 must be positive, 1e"),
        ({"presence_penalty": -1e7}, "presence_penalty -10000000.0 must be a number"),
        ({"frequency_penalty": 1e39}, "frequency_penalty 1e.39 must be a number from"),
        ({"logit_bias": {3: float("inf")}}, "logit_bias .* numbers of at most 1e.06"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": {3.0: 1.0}}, "logit_bias"),
        ({"logit_bias": {3: True}}, "logit_bias"),
        ({"repetition_penalty": 0}, "repetition_penalty 0 must be positive"),
        ({"presence_penalty": float("inf")}, "presence_penalty inf"),
        ({"frequency_penalty": None}, "frequency_penalty None"),
        ({"logit_bias": [1]}, r"logit_bias \[1\] must map"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"min_new_tokens": -2}, "min_new_tokens -2"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)
