"""Labels kept while text is written, against those of `--exp=label`."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_chat

from experiments import run
from m2r2_jax.models import transformer
from m2r2_jax.training import packing
from m2r2_jax.training.exchanges import chat_frame
from m2r2_jax.training.labels import PACKED_NAMES, LabelStore


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> str:
    return str(tiny_chat.write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def write(gguf: str, out: Path, *more: str) -> LabelStore:
    arguments = [
        *("--exp=write", f"--model={gguf}", f"--out={out}", "--limit=20"),
        *("--set=rows=4", "--set=max_prompt_tokens=20", "--set=max_answer_tokens=50"),
        *("--set=row_length=128", "--set=dataset=false", "--set=labels=true"),
    ]
    run.main([*arguments, *more])
    return LabelStore(out / "labels")


@pytest.fixture(scope="module")
def by_shards(gguf, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("by_shards")
    write(gguf, out, "--set=shard=8")
    return out


@pytest.mark.parametrize("prompts", ["own", "file"])
def test_kept_labels_are_those_of_labelling_the_text(prompts, gguf, tmp_path):
    more = []
    if prompts == "file":
        lines = [json.dumps({"id": str(n), "prompt": "ab" * n}) for n in range(1, 9)]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
        more = [f"--data={tmp_path / 'prompts.jsonl'}"]
    kept = write(gguf, tmp_path / "write", *more)
    labelling = ["--exp=label", f"--model={gguf}", f"--out={tmp_path / 'label'}"]
    labelling += [f"--data={tmp_path / 'write/shards'}", "--set=row_length=128"]
    run.main(labelling)
    label = LabelStore(tmp_path / "label")
    for name in PACKED_NAMES:
        found, expected = getattr(kept.packed, name), getattr(label.packed, name)
        np.testing.assert_array_equal(found, expected)
    assert kept.rows_done == label.rows_done == len(label.packed)
    # All that is read in training: trained tokens and what stands before them.
    read, segment = np.array(label.packed.trained), label.packed.segment
    assert read.sum() > 300
    read[:, :-1] |= read[:, 1:] & (segment[:, :-1] == segment[:, 1:])
    read |= segment == 0
    found, expected = (np.float32(s.states[read]) for s in (kept, label))
    np.testing.assert_allclose(found, expected, rtol=0.01, atol=0.01)
    assert np.mean(found == expected) > 0.95  # Others lie at an edge of rounding.
    model = tiny_chat.chat_model()
    logits = transformer.unembed(model.decoder, model.params, jnp.asarray(expected))
    second, first = np.sort(logits, axis=-1)[:, -2:].T
    clear = first - second > 0.1
    assert clear.mean() > 0.5
    np.testing.assert_array_equal(kept.argmax[read][clear], label.argmax[read][clear])
    ranking = [np.load(store.folder / "ranking.npy") for store in (kept, label)]
    np.testing.assert_array_equal(*ranking)


def files(folder: Path) -> dict[str, bytes]:
    found = {p.name: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert len(found) > 6
    return found


def test_interrupted_writing_goes_on_with_the_same_labels(gguf, by_shards, tmp_path):
    out = tmp_path / "out"
    shutil.copytree(by_shards, out)
    # The second shard is in the store already, its text is not there yet.
    for name in ("0000008-8", "0000016-4"):
        (out / "shards" / f"{name}.jsonl").unlink()
    for name in PACKED_NAMES:
        rows = np.load(out / "labels" / f"{name}.npy")
        np.save(out / "labels" / f"{name}.npy", np.concatenate([rows, rows]))
    assert len(LabelStore(out / "labels").packed) == len(rows)
    write(gguf, out, "--set=shard=8")
    assert files(out) == files(by_shards)


def test_a_longer_shard_takes_the_place_of_a_shorter_one(gguf, by_shards, tmp_path):
    write(gguf, tmp_path, "--set=shard=8", "--limit=18")
    write(gguf, tmp_path, "--set=shard=8")
    assert files(tmp_path) == files(by_shards)


def test_text_is_the_same_without_labels_which_are_then_missed(
    gguf, by_shards, tmp_path
):
    with pytest.raises(FileNotFoundError, match="no labels at"):
        write(gguf, tmp_path, "--set=shard=8", "--set=labels=false")
    assert not (tmp_path / "labels").exists()
    for path in (tmp_path / "shards").iterdir():
        assert path.read_bytes() == (by_shards / "shards" / path.name).read_bytes()
    with pytest.raises(ValueError, match="0-8.jsonl was written without labels"):
        write(gguf, tmp_path, "--set=shard=8")
    with pytest.raises(ValueError, match="labels made with other settings"):
        write(gguf, by_shards, "--set=shard=8", "--set=row_length=64")


def test_shards_lie_behind_each_other_in_one_store(by_shards):
    store = LabelStore(by_shards / "labels")
    shards = store.meta["shards"]
    assert [*shards] == ["0000000-8", "0000008-8", "0000016-4"]
    bounds = [*shards.values(), store.rows_done]
    assert bounds[0] == 0 and bounds[-1] == len(store.packed) and len(bounds) == 4
    tokenizer = tiny_chat.chat_model().tokenizer
    frame = chat_frame(tokenizer)
    for name, first, end in zip(shards, bounds, bounds[1:], strict=False):
        path = by_shards / "shards" / f"{name}.jsonl"
        written = packing.read_conversations(path, tokenizer, frame)
        expected = packing.pack(written, frame, 128, 0)
        np.testing.assert_array_equal(store.packed.tokens[first:end], expected.tokens)
        assert store.states[first:end][expected.trained].any(-1).all()
