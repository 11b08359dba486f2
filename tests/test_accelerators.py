"""Files of trained accelerators, and the method that drafts with them."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import PLAIN, TINY, run_one, tiny_accelerators

from m2r2_jax import build_method
from m2r2_jax.checkpoints.accelerators import (
    DraftSettings,
    TrainedAccelerators,
    load_accelerators,
    save_accelerators,
)
from m2r2_jax.models.config import ModelConfig
from m2r2_jax.models.multirate import MultiRateConfig

IDS = np.random.default_rng(0).permutation(TINY.vocab_size)[:200]
TRAINED = TrainedAccelerators(
    "tiny",
    MultiRateConfig(2, rank=3),
    tiny_accelerators(2, scale=0.3, carry=0.5),
    IDS,
    DraftSettings(length=4, min_confidence=0.01),
    {"seed": 1},
)


@pytest.mark.parametrize("ids", [IDS, None], ids=["reduced", "full"])
def test_accelerators_come_back_as_bf16_kept_them(ids, tmp_path):
    path = tmp_path / "a.safetensors"
    save_accelerators(path, dataclasses.replace(TRAINED, head_ids=ids))
    found = load_accelerators(path, TINY)
    for name in ("model", "rates", "settings", "recipe"):
        assert getattr(found, name) == getattr(TRAINED, name)
    assert (found.head_ids is None) if ids is None else (found.head_ids == ids).all()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2**-8),
        found.params,
        TRAINED.params,
    )
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_reduced_head_drafts_only_its_ids_and_loses_nothing(
    tmp_path, tiny_model, temperature
):
    path = tmp_path / "a.safetensors"
    save_accelerators(path, TRAINED)
    method = build_method("m2r2", tiny_model, accelerators=str(path))
    assert method.drafter.length == 4 and method.note == ""
    # q, o, then gate, up and down of two layers at rank 3, and three square maps.
    D, F, N = TINY.width, TINY.hidden_width, TINY.num_heads * TINY.head_dim
    layers = 2 * 3 * ((D + N) * 2 + (D + F) * 3)
    assert method.trainable_parameters == layers + 3 * D * D
    settings = {"temperature": temperature, "seed": 3}
    answer = run_one(tiny_model, method, [5, 17, 42], 120, **settings)
    plain = run_one(tiny_model, PLAIN, [5, 17, 42], 120, **settings)
    assert answer.token_ids == plain.token_ids
    assert sum(answer.accepted) > 0
    # What the head lacks can never be accepted: each such token ends its round.
    ends = np.cumsum(answer.committed) - 1
    lacking = [i for i, token in enumerate(answer.token_ids) if token not in set(IDS)]
    assert lacking and set(lacking) <= set(ends.tolist())


def test_settings_given_by_hand_win_over_the_stored_ones(tmp_path, tiny_model):
    path = tmp_path / "a.safetensors"
    save_accelerators(path, TRAINED)
    given = {"accelerators": str(path), "length": 2, "min_confidence": 0.5}
    drafter = build_method("m2r2", tiny_model, **given).drafter
    assert (drafter.length, drafter.min_confidence) == (2, 0.5)


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no accelerators at .*nowhere"):
        load_accelerators(tmp_path / "nowhere", TINY)
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"no such thing")
    with pytest.raises(ValueError, match="not a file of accelerators"):
        load_accelerators(path, TINY)
    save_accelerators(path, TRAINED)
    other: ModelConfig = dataclasses.replace(TINY, width=64, name="other")
    with pytest.raises(ValueError, match="trained for tiny and do not fit other"):
        load_accelerators(path, other)
    save_accelerators(path, dataclasses.replace(TRAINED, head_ids=IDS + 200))
    with pytest.raises(ValueError, match=rf"ids from \d+ to \d+, .* {TINY.vocab_size}"):
        load_accelerators(path, TINY)
