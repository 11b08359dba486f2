"""Labels, losses and the training step: against slow and separate ways to the same."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chat
from conftest import TINY, TINY_DECODER, tiny_accelerators

from m2r2_jax import Session
from m2r2_jax.drafters import MultiRateChain
from m2r2_jax.drafters.draft_head import draft_head
from m2r2_jax.drafters.methods import Method
from m2r2_jax.models import multirate, transformer
from m2r2_jax.models.multirate import MultiRateConfig
from m2r2_jax.training import labels, losses, packing, steps, writing
from m2r2_jax.training.closed_form import closed_form_start
from m2r2_jax.training.exchanges import chat_frame
from m2r2_jax.training.labels import LabelStore
from m2r2_jax.training.losses import Batch, draft_losses
from m2r2_jax.training.steps import TrainConfig
from m2r2_jax.training.writing_state import WritingConfig

MODEL = tiny_chat.chat_model(gain=2)
FRAME = chat_frame(MODEL.tokenizer)
LENGTH, DRAFTS = 128, 3
RATES = MultiRateConfig(2, rank=3)
TRAIN = TrainConfig(steps=200, draft_steps=2, warmup=5, learning_rate=5e-3)


@functools.cache
def conversations(count: int = 24, seed: int = 0):
    """Prompts at random, answers all greedy."""
    config = WritingConfig(
        rows=8, max_prompt_tokens=8, max_answer_tokens=30, sampled_every=10**6
    )
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, 256, rng.integers(2, 8)).tolist() for _ in range(count)]
    state = writing.start(MODEL, FRAME, config, count, prompts=prompts)
    eos = jnp.asarray([257])
    while not bool(state.done):
        state = writing.write(
            MODEL.decoder,
            MODEL.params,
            FRAME,
            config,
            eos,
            jnp.int32(1),
            state,
            jnp.int32(50),
        )
    return writing.collect(FRAME, state)


def labelled(folder, packed) -> LabelStore:
    store = LabelStore.create(folder, packed, TINY.width, {"about": "test"})
    for _ in labels.label_rows(MODEL, store, 2):
        pass
    return LabelStore(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> LabelStore:
    packed = packing.pack(conversations(), FRAME, LENGTH, 0)
    return labelled(tmp_path_factory.mktemp("labels"), packed)


def batch_of(store: LabelStore, index) -> Batch:
    packed = store.packed
    arrays = (packed.tokens, packed.segment, packed.position, packed.trained)
    arrays = (*arrays, store.states, store.argmax)
    return Batch(*(jnp.asarray(array[index]) for array in arrays))


def head():
    return draft_head(MODEL.config, MODEL.params)


def test_labels_of_packed_rows_are_those_of_each_conversation_alone(store):
    packed, opening = store.packed, len(FRAME.opening)
    checked = 0
    for row in range(len(packed)):
        for number in range(1, packed.segment[row].max() + 1):
            here = np.flatnonzero(packed.segment[row] == number)
            alone = np.concatenate(
                [packed.tokens[row, :opening], packed.tokens[row, here]]
            )
            # One shape for all: what stands behind a token does not reach it.
            padded = np.pad(alone, (0, LENGTH - len(alone)))
            logits = np.asarray(
                transformer.forward(TINY_DECODER, MODEL.params, padded[None])
            )
            logits = logits[0, : len(alone)]
            assert (store.argmax[row, here] == logits[opening:].argmax(-1)).all()
            state = jnp.asarray(store.states[row, here], jnp.float32)
            found = np.asarray(transformer.unembed(MODEL.decoder, MODEL.params, state))
            np.testing.assert_allclose(found, logits[opening:], atol=0.05)
            checked += 1
    assert checked == len(conversations())


def test_labelling_that_was_interrupted_goes_on_and_ends_the_same(store, tmp_path):
    packed = packing.pack(conversations(), FRAME, LENGTH, 0)
    part = LabelStore.create(tmp_path, packed, TINY.width, {"about": "test"})
    steps = labels.label_rows(MODEL, part, 2)
    next(steps), next(steps)
    again = labelled(tmp_path, packed)
    assert again.rows_done == len(packed)
    for name in ("states", "argmax"):
        assert (getattr(again, name) == getattr(store, name)).all()
    # Labels of other text do not count.
    other = packing.pack(conversations(), FRAME, LENGTH, 1)
    assert LabelStore.create(tmp_path, other, TINY.width, {}).rows_done == 0


def test_labels_that_are_not_there_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--exp=label"):
        LabelStore(tmp_path)


def test_simulated_acceptance_is_that_of_decoding(store):
    """The unrolled stream of training drafts what the drafter drafts in decoding."""
    accelerators = tiny_accelerators(2, scale=0.3, carry=0.3)
    rates, batch = RATES, batch_of(store, slice(None))
    exits = steps.exit_states(TINY, rates, DRAFTS, MODEL.params, accelerators, batch)
    logits = [transformer.unembed(MODEL.decoder, MODEL.params, s) for s in exits[0]]
    drafts_ST = [np.asarray(logit).argmax(-1) for logit in logits]
    layers = transformer.unroll(accelerators["layers"])
    params = {"accelerators": {**accelerators, "layers": layers}, "head": head()}
    method = Method("m2r2", MultiRateChain(2, DRAFTS), params)
    packed, rounds = store.packed, 0
    for row in range(len(packed)):
        for number in range(1, packed.segment[row].max() + 1):
            here = np.flatnonzero(packed.segment[row] == number)
            tokens = packed.tokens[row]
            bridge = list(FRAME.bridge)
            start = next(
                i for i in here if tokens[i : i + len(bridge)].tolist() == bridge
            ) + len(bridge)
            prompt = [*FRAME.opening, *tokens[here[0] : start].tolist()]
            answer = Session(MODEL, method).run([prompt], int(here[-1] - start + 1))[0][
                0
            ]
            at = start - 1  # The root: its state drafts the answer's first token.
            for proposed, accepted, committed in zip(
                answer.proposed, answer.accepted, answer.committed, strict=True
            ):
                expected = 0
                while (
                    expected < proposed
                    and at + expected < here[-1]
                    and drafts_ST[expected][row, at + expected]
                    == store.argmax[row, at + expected]
                ):
                    expected += 1
                if at + DRAFTS < here[-1]:
                    assert accepted == expected
                    rounds += 1
                at += committed
    assert rounds > 100
    counts = steps.acceptance_counts(
        TINY, rates, DRAFTS, MODEL.params, head(), accelerators, batch
    )
    assert counts[0] == packed.trained.sum()
    assert (np.diff(counts) <= 0).all() and counts[1] > 0


def test_a_segment_s_first_token_follows_the_opening():
    segment = jnp.asarray([[0, 0, 1, 1, 2, 2, -1, -1]])
    nothing = jnp.zeros((1, 8))
    batch = Batch(nothing, segment, nothing, nothing, nothing, nothing)
    found = steps.previous(batch, jnp.arange(8.0)[None])
    assert found[0, 1:6].tolist() == [0, 1, 2, 1, 4]


def test_losses_and_gradients_in_pieces_are_those_of_the_whole(store, monkeypatch):
    batch = batch_of(store, slice(2))
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(2, *batch.states.shape)), jnp.float32)
    ids = jnp.asarray(rng.permutation(TINY.vocab_size)[:120])
    small = draft_head(MODEL.config, MODEL.params, ids)
    weight = batch.trained / batch.trained.sum()

    def whole(states):
        teacher = batch.states.astype(jnp.float32)
        p = jax.nn.softmax(teacher @ small.weight.T)
        q = jax.nn.softmax(states @ small.weight.T)
        divergence = jnp.sum(p * (jnp.log(p) - jnp.log(q)), -1)
        refused = 1 - jnp.sum(jnp.minimum(p, q), -1)
        squares = jnp.sum((states - teacher) ** 2, -1) / jnp.sum(teacher**2, -1)
        norms = jnp.linalg.norm(states, axis=-1) * jnp.linalg.norm(teacher, axis=-1)
        distance = 1 - jnp.sum(states * teacher, -1) / norms + squares
        total = divergence + TRAIN.overlap * refused + TRAIN.alignment * distance
        return jnp.sum(total * weight, axis=(1, 2)), jnp.argmax(q, -1)

    def pieces(states):
        return draft_losses((TRAIN.overlap, TRAIN.alignment), small, states, batch)

    monkeypatch.setattr(losses, "_TOKENS_PER_PIECE", 64)
    found, parts = pieces(states)
    expected, best = whole(states)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    agreement = jnp.sum((ids[best] == batch.argmax) * weight, axis=(1, 2))
    np.testing.assert_allclose(parts["agreement"], agreement, rtol=1e-5)
    scale = jnp.asarray([1.0, 0.7])
    found = jax.grad(lambda s: pieces(s)[0] @ scale)(states)
    wanted = jax.grad(lambda s: whole(s)[0] @ scale)(states)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)


def trained(store, count, rates=RATES, **changes):
    train = dataclasses.replace(TRAIN, **changes)
    state = steps.init_state(TINY, rates, train, jax.random.key(0))
    batch = batch_of(store, slice(None))
    started = closed_form_start(TINY, rates, MODEL.params, state.accelerators, [batch])
    first = jax.device_get(started)  # The state is donated.
    state = state.replace(accelerators=started)
    for _ in range(count):
        state, metrics = steps.train_step(
            TINY, rates, train, MODEL.params, head(), state, batch
        )
    return first, state, metrics


def test_training_changes_the_accelerators_and_nothing_else(store):
    """I3: gradients reach every accelerator and no parameter of the model."""
    before = jax.device_get(MODEL.params)
    first, state, _ = trained(store, 3)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(MODEL.params))
    changed = jax.tree.map(
        lambda a, b: bool(jnp.any(a != b)), first, state.accelerators
    )
    assert all(jax.tree.leaves(changed)), changed
    assert int(state.step) == 3


def test_later_exits_are_trained_too(store):
    rates = MultiRateConfig(1, rank=3, later_exits=(2, 4))
    _, state, metrics = trained(store, 40, rates)
    assert jax.tree.leaves(state.accelerators["layers"])[0].shape[0] == 4
    assert {name.split("/")[0] for name in metrics} >= {"exit1", "exit2", "exit4"}
    _, _, first = trained(store, 1, rates)
    for exit in (1, 2):
        name = f"exit{exit}/draft1/divergence"
        assert metrics[name] < first[name]


def test_two_hundred_steps_raise_acceptance_on_held_out_text(tmp_path):
    """From near chance, without the closed form's help; with it, training adds."""
    train_rows = packing.pack(conversations(200), FRAME, LENGTH, 0)
    held_rows = packing.pack(conversations(16, seed=9), FRAME, LENGTH, 0)
    learned = labelled(tmp_path / "train", train_rows)
    held_out = batch_of(labelled(tmp_path / "held_out", held_rows), slice(None))
    train = dataclasses.replace(TRAIN, draft_steps=1, learning_rate=1e-2)

    def acceptance(accelerators):
        counts = steps.acceptance_counts(
            TINY, RATES, 1, MODEL.params, head(), accelerators, held_out
        )
        return counts[1] / counts[0]

    def after_training(started):
        state = steps.init_state(TINY, RATES, train, jax.random.key(0))
        state, rng = state.replace(accelerators=started), np.random.default_rng(0)
        for _ in range(200):
            batch = batch_of(learned, rng.permutation(len(train_rows))[:8])
            state, _ = steps.train_step(
                TINY, RATES, train, MODEL.params, head(), state, batch
            )
        return acceptance(state.accelerators)

    untrained = multirate.init_accelerators(TINY, RATES, jax.random.key(0))
    every = [batch_of(learned, slice(None))]
    started = closed_form_start(TINY, RATES, MODEL.params, untrained, every)
    closed_form = acceptance(started)
    assert acceptance(untrained) < 0.2
    assert 0.4 < closed_form < after_training(started)
    again = multirate.init_accelerators(TINY, RATES, jax.random.key(0))
    assert after_training(again) > 0.5


def test_impossible_settings_are_refused():
    with pytest.raises(
        ValueError, match="steps 0 and draft_steps 2 must be at least 1"
    ):
        dataclasses.replace(TRAIN, steps=0)
    with pytest.raises(ValueError, match="exit layer 2 is outside .* choose 3..4"):
        MultiRateConfig(2, 3, later_exits=(2,)).validate(TINY)
