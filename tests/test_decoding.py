"""Tests of plain decoding against a naive loop, of sampling, and of where it ends."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import NEVER, PLAIN, TINY, TINY_DECODER, run_one

from m2r2_jax.decoding import passes, sampling, state
from m2r2_jax.decoding.adjustments import Adjustments
from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.decoding.state import DecodeState, Trace
from m2r2_jax.models import transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder
from m2r2_jax.ops.compilation import CompileClock
from m2r2_jax.ops.execution import EXACT, Execution
from m2r2_jax.ops.execution import PLAIN as PLAINLY
from m2r2_jax.serving.session import Session

PROMPT = [5, 17, 42, 3]


def naive_greedy(model, prompt: list[int], count: int) -> list[int]:
    """Runs the whole text again for every token; padding is behind what is read."""
    forward = jax.jit(transformer.forward, static_argnums=0)
    ids = list(prompt)
    for _ in range(count):
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(ids)] = ids
        logits = forward(Decoder(model.config), model.params, tokens)
        ids.append(int(np.argmax(np.asarray(logits)[0, len(ids) - 1])))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def greedy(tiny_model) -> list[int]:
    return naive_greedy(tiny_model, PROMPT, 40)


@pytest.mark.parametrize("execution", [PLAINLY, EXACT, Execution("fused", 16)])
def test_greedy_equals_a_naive_loop(tiny_model, greedy, execution):
    model = dataclasses.replace(tiny_model, execution=execution)
    answer = run_one(model, PLAIN, PROMPT, 40)
    assert answer.token_ids == greedy
    assert len(set(greedy)) > 10, "a constant text would prove little"
    assert answer.finish_reason == "length"


def test_greedy_over_stacked_weights_is_the_same(tiny_stacked_model, greedy):
    answer = run_one(tiny_stacked_model, PLAIN, PROMPT, 40)
    assert answer.token_ids == greedy


@pytest.mark.parametrize("prompt", [[7], [1, 1, 1], list(range(100, 117))])
def test_other_prompts_equal_the_naive_loop(tiny_model, prompt):
    expected = naive_greedy(tiny_model, prompt, 20)
    assert run_one(tiny_model, PLAIN, prompt, 20).token_ids == expected


@pytest.mark.parametrize("count", [0, 1, 2])
def test_max_new_tokens_is_exact(tiny_model, greedy, count):
    answer = run_one(tiny_model, PLAIN, PROMPT, count)
    assert answer.token_ids == greedy[:count]
    assert answer.finish_reason == "length"
    assert answer.tau == (1.0 if count else None)
    assert sum(answer.committed) == count


def test_answer_ends_at_the_context_end(tiny_model):
    room = 7
    prompt = [index % 200 for index in range(TINY.context_length - room)]
    answer = run_one(tiny_model, PLAIN, prompt, 50)
    assert len(answer.token_ids) == room
    assert answer.finish_reason == "length"


def test_steps_in_pieces_give_the_same_tokens(tiny_model, greedy):
    session = Session(tiny_model, PLAIN)
    ids = list(PROMPT)
    for steps in (1, 3, 7):
        ((answer,), _) = session.run([ids], 40, max_steps=steps)
        assert len(answer.token_ids) == steps
        ids += answer.token_ids
    assert ids[len(PROMPT) :] == greedy[:11]


@pytest.mark.parametrize("index", [0, 5, 12])
def test_answer_ends_at_the_first_end_id(tiny_model, greedy, index):
    end = greedy.index(greedy[index])
    answer = run_one(tiny_model, PLAIN, PROMPT, 40, eos_ids=frozenset({greedy[index]}))
    assert answer.token_ids == greedy[: end + 1]
    assert answer.finish_reason == "stop"


def test_any_of_several_ids_ends_an_answer(tiny_model, greedy):
    never, late, early = TINY.vocab_size, greedy[12], greedy[5]
    ends = frozenset({never, late, early})
    answer = run_one(tiny_model, PLAIN, PROMPT, 40, eos_ids=ends)
    end = min(greedy.index(late), greedy.index(early))
    assert answer.token_ids == greedy[: end + 1]


def test_without_end_ids_nothing_ends_an_answer(tiny_model, greedy):
    answer = run_one(tiny_model, PLAIN, PROMPT, 40, eos_ids=frozenset())
    assert answer.token_ids == greedy


def test_end_ids_in_the_prompt_do_not_end_an_answer(tiny_model, greedy):
    ends = frozenset({PROMPT[0]}) if PROMPT[0] not in greedy[:9] else NEVER
    assert ends != NEVER
    answer = run_one(tiny_model, PLAIN, PROMPT, 9, eos_ids=ends)
    assert answer.token_ids == greedy[:9]


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (0, []),
        (1, [16]),
        (16, [16]),
        (17, [32]),
        (33, [64]),
        (129, [256]),
        (255, [256]),
        (256, [256]),
        (257, [256, 16]),
        (700, [256, 256, 256]),
        (512, [256, 256]),
    ],
)
def test_prefill_chunks_are_full_ones_and_a_bucket(count, sizes):
    assert passes.chunk_sizes(count) == sizes


def prefilled(model, tokens, counts, size: int):
    """Cache and hidden state after one chunk of two rows, padded with junk."""
    padded = np.full((2, size), 7, np.int32)
    for row, count in enumerate(counts):
        padded[row, :count] = tokens[:count]
    cache = init_cache(TINY, 2, 64, jnp.float32, unrolled=True)
    hidden = jnp.full((2, TINY.width), 9.0)
    return passes.prefill(
        TINY_DECODER, model.params, cache, hidden, padded, np.array(counts, np.int32)
    )


def test_prefill_ignores_padding_and_empty_rows(tiny_model):
    tokens = np.arange(50, 66)
    exact, hidden = prefilled(tiny_model, tokens, (16, 5), 16)
    padded, padded_hidden = prefilled(tiny_model, tokens, (5, 0), 32)
    np.testing.assert_array_equal(exact.length, [16, 5])
    np.testing.assert_array_equal(padded.length, [5, 0])
    np.testing.assert_allclose(padded_hidden[0], hidden[1], atol=1e-5)
    np.testing.assert_array_equal(padded_hidden[1], np.full(TINY.width, 9.0))
    for short, whole in zip(padded.keys, exact.keys, strict=True):
        np.testing.assert_allclose(short[:2, :5], whole[2:, :5], atol=1e-5)


def test_same_seed_same_text_other_seed_other_text(tiny_model):
    def text(seed, temperature=0.9, execution=EXACT):
        model = dataclasses.replace(tiny_model, execution=execution)
        return run_one(
            model, PLAIN, PROMPT, 30, temperature=temperature, seed=seed
        ).token_ids

    assert text(3) == text(3) == text(3, execution=PLAINLY)
    assert len({tuple(text(seed)) for seed in range(5)}) == 5


def test_temperature_zero_is_greedy_whatever_the_seed(tiny_model, greedy):
    answer = run_one(tiny_model, PLAIN, PROMPT, 40, temperature=0.0, seed=11)
    assert answer.token_ids == greedy


def drawing(temperature, seed) -> Sampling:
    rows = zip(temperature, seed, strict=True)
    return Sampling.stack([SamplingParams(temperature=t, seed=int(s)) for t, s in rows])


choose = jax.jit(sampling.choose)
emit = jax.jit(state.emit)


@pytest.mark.parametrize("vary", ["seed", "position"])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_are_the_softmax(temperature, vary):
    count, logits = 20_000, np.random.default_rng(0).normal(size=12) * 2
    if vary == "seed":
        rows = jnp.broadcast_to(jnp.float32(logits), (count, 1, 12))
        how = drawing(np.full(count, temperature), np.arange(count))
        chosen = choose(rows, how, jnp.full((count, 1), 4))
    else:
        rows = jnp.broadcast_to(jnp.float32(logits), (1, count, 12))
        chosen = choose(rows, drawing([temperature], [4]), jnp.arange(count)[None])
    found = np.bincount(np.ravel(chosen), minlength=12) / count
    weights = np.exp(logits / temperature)
    distance = np.abs(found - weights / weights.sum()).sum() / 2
    # 20,000 draws of 12 outcomes are expected .007 apart from their distribution.
    assert distance < 0.02


def test_noise_depends_on_seed_and_position_alone():
    logits = jnp.float32(np.random.default_rng(0).normal(size=(1, 5, 40)))
    position = jnp.arange(5)[None]
    alone = choose(logits, drawing([0.9], [6]), position)
    neighbours = jnp.concatenate([logits * 3, logits, -logits])
    among = choose(
        neighbours, drawing([0.3, 0.9, 0.0], [1, 6, 6]), jnp.repeat(position, 3, 0)
    )
    np.testing.assert_array_equal(among[1], alone[0])
    single = choose(logits[:, 2:3], drawing([0.9], [6]), position[:, 2:3])
    np.testing.assert_array_equal(single[0], alone[0, 2:3])


def test_greedy_rows_stay_greedy_beside_sampled_ones():
    logits = jnp.float32(np.random.default_rng(0).normal(size=(2, 50, 40)))
    chosen = choose(logits, drawing([0.0, 5.0], [1, 1]), jnp.ones((2, 50), int))
    np.testing.assert_array_equal(chosen[0], np.argmax(logits[0], axis=-1))
    assert np.mean(chosen[1] == np.argmax(logits[1], axis=-1)) < 0.5


def test_ties_go_to_the_lowest_id():
    logits = jnp.array([[[0.0, 3.0, 3.0, 1.0, 3.0]]])
    chosen = choose(logits, drawing([0.0], [0]), jnp.array([[0]]))
    np.testing.assert_array_equal(chosen, [[1]])


def emitted(tokens, counts, *, limits, done=None, eos=()):
    """State and counts after `emit` on rows that hold three tokens each."""
    batch = len(tokens)
    cache = init_cache(TINY, batch, 16, jnp.float32, unrolled=True)
    history = np.full((batch, 16), -1, np.int32)
    history[:, :3] = [90, 91, 92]
    state = DecodeState(
        cache.replace(length=np.full(batch, 2, np.int32)),
        history,
        limit=np.array(limits, np.int32),
        done=np.array(done or [False] * batch),
        eos=np.array(eos, np.int32),
        sampling=drawing([0.0] * batch, [0] * batch),
        adjustments=Adjustments.stack([SamplingParams()] * batch, [3] * batch),
        scored=np.array(False),
        scores=np.zeros((batch, 16), np.float32),
        trace=Trace.empty(batch, 16),
        drafter=(),
    )
    tokens = np.array(tokens, np.int32)
    scores = np.zeros(tokens.shape, np.float32)
    return emit(state, tokens, scores, np.array(counts, np.int32))


def check(state, counts, expected_counts, expected_done):
    np.testing.assert_array_equal(counts, expected_counts)
    np.testing.assert_array_equal(state.done, expected_done)
    np.testing.assert_array_equal(state.cache.length, 2 + np.array(expected_counts))
    np.testing.assert_array_equal(state.length, state.cache.length + 1)


def test_emit_appends_the_counted_tokens():
    state, counts = emitted([[10, 11, 12], [20, 21, 22]], [2, 3], limits=[16, 16])
    check(state, counts, [2, 3], [False, False])
    np.testing.assert_array_equal(state.history[0, :5], [90, 91, 92, 10, 11])
    np.testing.assert_array_equal(state.history[1, :6], [90, 91, 92, 20, 21, 22])
    np.testing.assert_array_equal(state.root, [11, 22])


def test_emit_cuts_behind_the_first_end_id():
    tokens = [[10, 7, 8], [7, 11, 12], [10, 11, 7], [10, 11, 12]]
    state, counts = emitted(tokens, [3, 3, 2, 3], limits=[16] * 4, eos=[7, 8])
    # Row 2: the end id lies behind what is emitted, so it does not count.
    check(state, counts, [2, 1, 2, 3], [True, True, False, False])
    np.testing.assert_array_equal(state.root, [7, 7, 11, 12])


def test_emit_cuts_at_the_limit():
    tokens = [[10, 11, 12]] * 3
    state, counts = emitted(tokens, [3, 3, 2], limits=[4, 6, 6])
    check(state, counts, [1, 3, 2], [True, True, False])


def test_emit_cuts_at_the_limit_before_it_looks_for_end_ids():
    state, counts = emitted([[10, 7, 12]] * 2, [3, 3], limits=[4, 5], eos=[7])
    check(state, counts, [1, 2], [True, True])
    np.testing.assert_array_equal(state.root, [10, 7])


def test_emit_adds_nothing_to_rows_that_are_done():
    tokens = [[7, 11, 12], [10, 11, 12]]
    state, counts = emitted(
        tokens, [3, 1], limits=[16, 16], done=[True, False], eos=[7]
    )
    check(state, counts, [0, 1], [True, False])
    np.testing.assert_array_equal(state.root, [92, 10])


def test_decode_stops_when_every_row_is_done(tiny_model):
    """A batch runs as long as its longest row; the others hold their last state."""
    session = Session(tiny_model, PLAIN, batch=2)
    prompts = [PROMPT, list(range(TINY.context_length - 2))]
    (short, long), _ = session.run(prompts[::-1], 6, truncate="answer")
    assert (len(short.token_ids), len(long.token_ids)) == (2, 6)
    assert long.token_ids == run_one(tiny_model, PLAIN, PROMPT, 6).token_ids


def test_programs_are_shared_between_models_of_one_shape(tiny_model):
    plain = run_one(tiny_model, PLAIN, [5], 9)
    other = jax.tree.map(functools.partial(jnp.multiply, 1.5), tiny_model.params)
    changed_model = dataclasses.replace(tiny_model, params=other)
    clock = CompileClock()
    changed = run_one(changed_model, PLAIN, [5], 9)
    assert changed.token_ids != plain.token_ids
    assert clock.count == 0
