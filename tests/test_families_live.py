"""Every family against transformers itself, where it and PyTorch are installed."""

import sys
from pathlib import Path

import pytest
from family_checks import FOLDER, assert_cached_is, assert_uncached_is

sys.path.insert(0, str(Path(__file__).parent / "golden"))
pytest.importorskip("torch", exc_type=ImportError)
pytest.importorskip("transformers", exc_type=ImportError)
make_families = pytest.importorskip("make_families", exc_type=ImportError)

# Other values than those of the files.
SEED = 7


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_logits_are_those_of_transformers(name, tmp_path):
    model = make_families.tiny_model(name, seed=SEED)
    folder, found = tmp_path / name, make_families.results(model)
    make_families.write(model, folder)
    found = {key: value.numpy() for key, value in found.items()}
    assert_uncached_is(folder, found)
    assert_cached_is(folder, found)
