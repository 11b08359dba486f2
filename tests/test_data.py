"""Conversations on disk and in packed rows."""

import json
import lzma

import numpy as np
import pytest
import tiny_chat

from experiments.label import default_texts
from m2r2_jax.files import read_json_lines
from m2r2_jax.training import packing
from m2r2_jax.training.exchanges import Conversation, chat_frame
from m2r2_jax.training.labels import LabelStore, label_rows
from m2r2_jax.training.packing import PADDING

MODEL = tiny_chat.chat_model()
TOKENIZER, FRAME = MODEL.tokenizer, chat_frame(MODEL.tokenizer)
RNG = np.random.default_rng(0)


def conversation(prompt: int, answer: int) -> Conversation:
    ids = RNG.integers(0, 300, prompt + answer).tolist()
    return Conversation(ids[:prompt], [*ids[prompt:-1], 257], True)


MANY = [conversation(*RNG.integers(1, 40, 2)) for _ in range(50)]


@pytest.mark.parametrize("name", ["text.jsonl", "text.jsonl.xz"])
def test_conversations_come_back_exactly(name, tmp_path):
    hello = TOKENIZER.encode("hello")
    exact = [
        *MANY,
        Conversation(hello, [*hello, 257], True),
        Conversation(hello, hello, False),
        Conversation(hello, [], False),
    ]
    rows = [packing.as_row(c, TOKENIZER, FRAME) for c in exact]
    assert "response_ids" in rows[0] and "response_ids" not in rows[50]
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    packed = lzma.compress(text) if name.endswith("xz") else text
    (tmp_path / name).write_bytes(packed)
    for path in (tmp_path, tmp_path / name):
        assert packing.read_conversations(path, TOKENIZER, FRAME) == exact


def test_a_dataset_holds_the_same_conversations_in_order(tmp_path):
    dataset = pytest.importorskip("m2r2_jax.training.dataset")
    source = tmp_path / "shards"
    source.mkdir()
    apart = TOKENIZER.encode("line separators \u2028 and \x85")
    first, second = [*MANY[::2], Conversation(apart, [*apart, 257], True)], MANY[1::2]
    for name, part in (("0.jsonl", first), ("1.jsonl", second)):
        rows = (packing.as_row(c, TOKENIZER, FRAME) for c in part)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (source / name).write_text("".join(lines), encoding="utf-8")
    place = dataset.build(source, tmp_path / "dataset")
    assert list(place.glob("*.array_record*"))
    found = packing.read_conversations(place, TOKENIZER, FRAME)
    assert found == first + second
    assert dataset.build(source, tmp_path / "dataset") == place
    (source / "1.jsonl").unlink()
    grown = dataset.build(source, tmp_path / "dataset")
    assert packing.read_conversations(grown, TOKENIZER, FRAME) == first


def test_nothing_to_read_and_wrong_rows_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no .jsonl file and no dataset"):
        packing.read_conversations(tmp_path, TOKENIZER, FRAME)
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="row 1 is not a conversation .*response"):
        packing.read_conversations(tmp_path, TOKENIZER, FRAME)
    (tmp_path / "a.jsonl").write_text('\n{"prompt": "x"\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2 is not JSON"):
        packing.read_conversations(tmp_path, TOKENIZER, FRAME)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": [5, 300]}, r"prompt_ids holds 300; .* the ids 0\.\.299"),
        ({"response_ids": [7, -1]}, "response_ids holds -1"),
        ({"response_ids": [7.0]}, r"response_ids holds 7\.0"),
        ({"prompt_ids": ["7"]}, "prompt_ids holds '7'"),
        ({"prompt_ids": [True]}, "prompt_ids holds True"),
        ({"prompt_ids": "hello"}, "prompt_ids is 'hello', not a list"),
        ({"prompt_ids": {"7": 1}}, "prompt_ids is {'7': 1}, not a list"),
        ({"finished": "no"}, "finished is 'no', neither true nor false"),
        ({"finished": 1}, "finished is 1"),
        ({"finished": None}, "finished is None"),
        ({"prompt": 5}, "is not a conversation"),
    ],
)
def test_wrong_ids_are_refused_with_file_and_row(changes, message, tmp_path):
    good = {"prompt": "hello", "response": "he", "prompt_ids": [5], "finished": True}
    rows = [[good] * 3, [good, {**good, "prompt_ids": []} | changes]]
    for name, some in zip(("a.jsonl", "b.jsonl"), rows, strict=True):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in some))
    with pytest.raises(ValueError, match=rf"b\.jsonl, row 2.*{message}"):
        packing.read_conversations(tmp_path, TOKENIZER, FRAME)


def test_labels_of_another_vocabulary_are_refused(tmp_path):
    packed = packing.pack([Conversation([5, 300], [7, 257], True)], FRAME, 128, 0)
    store = LabelStore.create(tmp_path, packed, MODEL.config.width, {})
    store.check_ids(301)
    with pytest.raises(ValueError, match=r"row 0 has id 300; .* the ids 0\.\.299"):
        next(label_rows(MODEL, store, 1))
    store.add(0, np.zeros((1, 128, MODEL.config.width)), np.full((1, 128), 302))
    with pytest.raises(ValueError, match=r"row 0 has id 302; .* the ids 0\.\.300"):
        store.check_ids(301)


def test_packing_keeps_every_conversation_whole_and_once():
    packed = packing.pack(MANY, FRAME, 128, seed=3)
    opening = len(FRAME.opening)
    found = []
    for tokens, segment, position, trained, answers in zip(
        packed.tokens,
        packed.segment,
        packed.position,
        packed.trained,
        packing.in_answers(packed),
        strict=True,
    ):
        assert tokens[:opening].tolist() == list(FRAME.opening)
        assert not segment[:opening].any() and not trained[:opening].any()
        for number in range(1, segment.max() + 1):
            here = np.flatnonzero(segment == number)
            assert (np.diff(here) == 1).all()
            assert position[here].tolist() == [*range(opening, opening + len(here))]
            learned = trained[here].tolist(), answers[here].tolist()
            found.append((tokens[here].tolist(), *learned))
        assert not trained[segment == PADDING].any()
    expected = []
    for c in MANY:
        ids = [*c.prompt_ids, *FRAME.bridge, *c.answer_ids]
        # Behind which tokens the next is the conversation's, not the template's.
        own = [True] * len(c.prompt_ids) + [False] * len(FRAME.bridge)
        own += [True] * len(c.answer_ids)
        answer = [False] * (len(ids) - len(c.answer_ids)) + [True] * len(c.answer_ids)
        expected.append((ids, [*own[1:], False], [*answer[1:], False]))
    assert sorted(found) == sorted(expected)
    filled = (packed.segment != PADDING).mean()
    assert filled > 0.9


def test_packing_is_a_function_of_the_seed():
    one, same, other = (packing.pack(MANY, FRAME, 128, seed) for seed in (3, 3, 4))
    assert (
        packing.fingerprint(one)
        == packing.fingerprint(same)
        != packing.fingerprint(other)
    )


def test_long_conversations_are_cut_and_empty_ones_left_out():
    long = conversation(20, 300)
    packed = packing.pack([long, Conversation([], [1], True)], FRAME, 128, 0)
    assert len(packed) == 1
    room = 128 - len(FRAME.opening)
    ids = [*long.prompt_ids, *FRAME.bridge, *long.answer_ids][:room]
    assert packed.tokens[0, -room:].tolist() == ids
    assert not packed.trained[0, -1]
    with pytest.raises(ValueError, match="rows of 16 tokens have no room"):
        packing.pack(MANY, FRAME, 16, 0)


def test_ranking_counts_the_answers():
    ranking = packing.rank_tokens(MANY, 300)
    counts = np.bincount(np.concatenate([c.answer_ids for c in MANY]), minlength=300)
    assert ranking[0] == 257
    assert sorted(ranking) == list(range(300))
    assert (np.diff(counts[ranking]) <= 0).all()


def test_text_to_label_is_what_was_written_here_or_comes_along(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shipped = default_texts()
    assert [path.name for path in shipped] == [
        "self_written.jsonl.xz",
        "task_written.jsonl.xz",
    ]
    for path in shipped:
        row = next(read_json_lines(path))
        assert row["prompt"] and row["response"]
    (tmp_path / "results/write/shards").mkdir(parents=True)
    assert [str(path) for path in default_texts()] == ["results/write/shards"]
