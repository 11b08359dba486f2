"""`--exp=choose` and `--exp=sweep`: what they measure, and what they store."""

import json

import numpy as np
import pytest
import tiny_chat
from conftest import TINY as TINY_CONFIG
from test_accelerators import TRAINED

from experiments import choose, run, sweep
from experiments.sweep import SweepOptions
from m2r2_jax.checkpoints.accelerators import (
    DraftSettings,
    load_accelerators,
    save_accelerators,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return tiny_chat.write_gguf(path, context_length=2048)


@pytest.fixture
def stored(tmp_path):
    path = tmp_path / "accelerators.safetensors"
    save_accelerators(path, TRAINED)
    return path


def test_the_fastest_settings_are_stored_with_the_accelerators(
    tiny, stored, tmp_path, monkeypatch, capsys
):
    """Speeds are told, so that the choice is known: rates and texts are real."""
    speeds = {
        "autoregressive": (10.0, 1.0),
        "length 1, confidence 0.00": (11.0, 1.1),
        "length 1, confidence 0.50": (9.0, 1.0),
        "length 2, confidence 0.00": (10.5, 1.2),
        "length 2, confidence 0.50": (12.0, 1.1),
    }
    measured = {}

    def speed(name, results):
        measured[name] = choose_speed(name, results)
        return speeds[name]

    choose_speed = choose._speed
    monkeypatch.setattr(choose, "_speed", speed)
    grid = ["--set=lengths=1,2", "--set=percents=0,50"]
    record = run.main(
        [
            "--exp=choose",
            *grid,
            f"--model={tiny}",
            f"--data={stored}",
            "--limit=1",
            "--max_new_tokens=24",
            f"--out={tmp_path}",
        ]
    )
    assert record == {"experiment": "choose", "length": 2, "min_confidence": 0.5}
    assert load_accelerators(stored, TINY_CONFIG).settings == DraftSettings(2, 0.5)
    assert "length 2, confidence 0.50: 1.200x" in capsys.readouterr().out
    assert all(rate > 0 and tau >= 1 for rate, tau in measured.values())


def test_a_sweep_varies_one_quantity_at_a_time():
    options = SweepOptions(exits=(1, 2), ranks=(4, 8), heads=(50, 0), exit_layer=2)
    assert options.settings() == [(1, 4, 50), (2, 4, 50), (2, 8, 50), (2, 4, 0)]


def test_a_sweep_predicts_from_measured_costs(tiny, stored, monkeypatch):
    from m2r2_jax import load

    model = load(tiny)
    # Plain, then rounds of 1..4 drafts, then verification of as many.
    seconds = [1.0, 1.2, 1.5, 1.8, 2.1, 1.1, 1.2, 1.3, 1.4]
    monkeypatch.setattr(sweep, "seconds_a_round", lambda model, methods: seconds)
    found = sweep._costs(model, str(stored), [0.5, 0.4, 0.3, 0.2])
    taus = 1 + np.cumsum(np.cumprod([0.5, 0.4, 0.3, 0.2]))
    assert found["tau"] == pytest.approx(taus[-1])
    assert found["best_length"] == 1
    assert found["predicted_speedup"] == pytest.approx(taus[0] / 1.2)
    assert found["draft_cost"] == pytest.approx(np.median([0.1, 0.15, 0.5 / 3, 0.175]))
    assert json.dumps(found)
