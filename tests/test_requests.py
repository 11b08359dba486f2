"""What a run is asked for holds with drafts as without: every method gives the ids,
log-probabilities and ends of plain decoding, row by row.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NEVER, PLAIN, TINY, TINY_DECODER, TINY_METHODS

from m2r2_jax.checkpoints.model import Model
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.models import transformer
from m2r2_jax.serving.session import Session

PROMPTS = [[5, 17, 42, 3], [1, 1, 1], [7, 8, 9, 7, 8, 9, 7]]
every_method = pytest.mark.parametrize(
    "method", TINY_METHODS.values(), ids=TINY_METHODS
)
# Each has a bias, so that all share the programs of one shape.
SETTINGS = {
    "penalties": {
        "logit_bias": {7: 0.5},
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
    },
    "bias": {"logit_bias": {4: 3.0, 17: -5.0, 250: 2.0}},
    "filters": {
        "temperature": 1.1,
        "top_k": 20,
        "top_p": 0.9,
        "seed": 3,
        "logit_bias": {7: 0.5},
    },
    "all": {
        "temperature": 0.8,
        "min_p": 0.02,
        "presence_penalty": 0.6,
        "logit_bias": {9: 1.5},
        "seed": 8,
    },
}


class Spelling:
    """Spells each id as two letters and a space: text grows with every token."""

    eos_ids = NEVER

    def has_control(self, text):
        return False

    def token_bytes(self, ids, *, skip_special=True):
        letters = ((chr(97 + id // 26), chr(97 + id % 26)) for id in ids)
        return "".join(f"{first}{second} " for first, second in letters).encode()

    def decode(self, ids):
        return self.token_bytes(ids).decode()


@pytest.fixture(scope="module")
def model(tiny_model) -> Model:
    return dataclasses.replace(tiny_model, tokenizer=Spelling())


def answer(model, method, prompt, count=40, **settings):
    return Session(model, method).run([prompt], count, **settings)[0][0]


def naive(model, prompt, count, params: SamplingParams) -> list[int]:
    """Greedy with penalties and biases, the whole text again for every token."""
    forward, ids = jax.jit(transformer.forward, static_argnums=0), list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        logits = np.array(forward(TINY_DECODER, model.params, tokens)[0, len(ids) - 1])
        said = np.bincount(ids[len(prompt) :], minlength=TINY.vocab_size)
        for id in set(ids):
            factor = params.repetition_penalty
            logits[id] *= 1 / factor if logits[id] > 0 else factor
        logits -= params.presence_penalty * (said > 0) + params.frequency_penalty * said
        for id, bias in params.logit_bias.items():
            logits[id] += bias
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@pytest.mark.parametrize("name", ["penalties", "bias"])
def test_plain_decoding_equals_a_naive_loop(model, name):
    params = SamplingParams(**SETTINGS[name])
    found = answer(model, PLAIN, PROMPTS[0], sampling=params).token_ids
    assert found == naive(model, PROMPTS[0], 40, params)
    assert found != answer(model, PLAIN, PROMPTS[0]).token_ids


@every_method
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_drafts_change_neither_ids_nor_log_probabilities(model, method, settings):
    params = SamplingParams(**settings)
    for prompt in PROMPTS:
        asked = {"sampling": params, "logprobs": True}
        plain = answer(model, PLAIN, prompt, **asked)
        found = answer(model, method, prompt, **asked)
        assert found.token_ids == plain.token_ids
        np.testing.assert_allclose(found.logprobs, plain.logprobs, atol=1e-4)
        assert len(found.logprobs) == len(found.token_ids)


def test_log_probabilities_are_those_of_the_whole_text(model):
    found = answer(model, TINY_METHODS["m2r2"], PROMPTS[0], 20, logprobs=True)
    ids = PROMPTS[0] + found.token_ids
    logits = transformer.forward(TINY_DECODER, model.params, jnp.array([ids]))[0]
    chances = jax.nn.log_softmax(logits)[
        jnp.arange(3, len(ids) - 1), jnp.array(ids[4:])
    ]
    np.testing.assert_allclose(found.logprobs, chances, atol=1e-4)
    assert answer(model, PLAIN, PROMPTS[0], 5).logprobs is None


@every_method
def test_rows_with_settings_of_their_own_equal_their_single_runs(model, method):
    rows = [
        SamplingParams(**SETTINGS[name]) for name in ("penalties", "filters", "all")
    ]
    counts = [40, 9, 25]
    together, _ = Session(model, method, batch=3).run(PROMPTS, counts, sampling=rows)
    for prompt, count, params, found in zip(
        PROMPTS, counts, rows, together, strict=True
    ):
        alone = answer(model, PLAIN, prompt, count, sampling=params)
        assert found.token_ids == alone.token_ids
        assert len(found.token_ids) == count


@every_method
def test_an_end_is_not_chosen_before_min_new_tokens(model, method):
    greedy = answer(model, PLAIN, PROMPTS[0]).token_ids
    ends = frozenset(greedy[3:5])
    for least in (0, 3, 12):
        params = SamplingParams(min_new_tokens=least)
        asked = {"sampling": params, "eos_ids": ends}
        plain = answer(model, PLAIN, PROMPTS[0], **asked)
        found = answer(model, method, PROMPTS[0], **asked)
        assert found.token_ids == plain.token_ids
        assert not ends & set(found.token_ids[:least])
        assert len(found.token_ids) > least


def cached_is_right(session, model, prompt, found):
    """The next turn reuses what was given and equals a fresh session's."""
    assert session.cached_ids == [(prompt + found.token_ids)[:-1]]
    turn = prompt + found.token_ids + [11, 12]
    (reused,), _ = session.run([turn], 10)
    assert reused.token_ids == answer(model, PLAIN, turn, 10).token_ids


@every_method
@pytest.mark.parametrize("length", [1, 8])
def test_a_stop_string_cuts_text_ids_and_cache_at_one_token(model, method, length):
    """Wherever it lies in an accepted block, and across its borders."""
    whole = answer(model, PLAIN, PROMPTS[2], logprobs=True)
    text = whole.text(model.tokenizer)
    for start in (4, 17, 33, 58):
        stop = text[start : start + length]
        end = text.index(stop) + length
        session = Session(model, method)
        (found,), _ = session.run([PROMPTS[2]], 40, stop=[stop, "?"], logprobs=True)
        count = -(-end // 3)  # Three characters a token.
        assert found.token_ids == whole.token_ids[:count]
        assert found.text(model.tokenizer) == text[: end - length]
        assert found.finish_reason == "stop"
        assert len(found.logprobs) == sum(found.committed) == count
        cached_is_right(session, model, PROMPTS[2], found)


def test_rows_meet_their_stop_strings_at_different_times(model):
    alone = [answer(model, PLAIN, prompt) for prompt in PROMPTS]
    stop = [
        a.text(model.tokenizer)[i : i + 6]
        for a, i in zip(alone, (9, 60, 30), strict=True)
    ]
    session = Session(model, TINY_METHODS["prompt_lookup"], batch=3)
    together, _ = session.run(PROMPTS, 40, stop=stop)
    for prompt, found in zip(PROMPTS, together, strict=True):
        expected = answer(model, PLAIN, prompt, stop=stop)
        assert found.token_ids == expected.token_ids
        assert found.stopped_at == expected.stopped_at
    assert len({len(found.token_ids) for found in together}) > 1


@every_method
def test_a_stream_gives_the_run_in_parts(model, method):
    session = Session(model, method)
    whole = answer(model, method, PROMPTS[0])
    parts = [found for (found,) in session.stream([PROMPTS[0]], 40, steps=3)]
    assert parts[0].token_ids == [] and parts[-1] == whole
    for earlier, later in zip(parts, parts[1:], strict=False):
        count = len(earlier.token_ids)
        assert later.token_ids[:count] == earlier.token_ids
        assert 0 < len(later.token_ids) - count <= 3 * 9
    cached_is_right(session, model, PROMPTS[0], whole)


@every_method
@pytest.mark.parametrize("taken", [0, 1, 2])
def test_a_stream_closed_early_leaves_the_cache_at_what_was_given(model, method, taken):
    session = Session(model, method)
    stream = session.stream([PROMPTS[0]], 40, steps=2)
    for _ in range(taken + 1):
        (found,) = next(stream)
    stream.close()
    cached_is_right(session, model, PROMPTS[0], found)


def test_a_stream_is_refused_when_it_is_asked_for(model):
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        Session(model, PLAIN).stream([[]], 5)
    with pytest.raises(ValueError, match="steps 0 must be at least 1"):
        Session(model, PLAIN).stream([[1]], 5, steps=0)


@pytest.mark.parametrize("truncate", ["answer", "prompt"])
def test_truncate_says_what_gives_way(model, truncate):
    prompt = [index % 200 for index in range(240)]
    found = answer(model, PLAIN, prompt, 20, truncate=truncate).token_ids
    if truncate == "answer":
        assert found == answer(model, PLAIN, prompt, 7).token_ids
    else:
        assert found == answer(model, PLAIN, prompt[-227:], 20).token_ids


@every_method
def test_settings_that_leave_no_token_are_an_error(model, method):
    """Whatever forbids the last of them, and whichever row it is."""
    others = dict.fromkeys(range(2, TINY.vocab_size), -np.inf)
    penalised = {
        "logit_bias": {**others, 0: -100.0, 1: -100.0},
        "presence_penalty": 1e6,
    }
    session = Session(model, method, batch=2)
    for forbidding, ends in (
        ({"logit_bias": {**others, 0: -np.inf, 1: -np.inf}}, NEVER),
        ({"logit_bias": others, "min_new_tokens": 3}, frozenset({0, 1})),
        ({**penalised, "temperature": 1.0}, NEVER),
    ):
        rows = [SamplingParams(), SamplingParams(**forbidding)]
        with pytest.raises(ValueError, match="leave no token at position . of row 1"):
            session.run(PROMPTS[:2], 5, sampling=rows, eos_ids=ends)
        assert session.cached_ids == [[], []]


@pytest.mark.parametrize("stop", [None, [], ["b", "zz"]])
def test_stop_strings_may_come_from_anything(model, stop):
    expected = answer(model, PLAIN, PROMPTS[0], stop=stop or ())
    given = stop and (string for string in stop)
    assert answer(model, PLAIN, PROMPTS[0], stop=given) == expected


def test_numpy_settings_give_the_same_ids(model):
    given = {"temperature": np.float32(0.7), "top_k": np.int64(5)}
    own = {"temperature": 0.7, "top_k": 5}
    found, expected = (
        answer(model, PLAIN, PROMPTS[0], count, sampling=SamplingParams(**settings))
        for settings, count in ((given, np.int64(10)), (own, 10))
    )
    assert found == expected


@every_method
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_with_a_nan_are_an_error(model, method, temperature):
    head = model.params["head"].at[7].set(jnp.nan)
    broken = dataclasses.replace(model, params={**model.params, "head": head})
    session = Session(broken, method)
    how = SamplingParams(temperature=temperature)
    with pytest.raises(FloatingPointError, match="NaN at position 4 of row 0"):
        session.run([PROMPTS[0]], 5, sampling=how)
    assert session.cached_ids == [[]]
