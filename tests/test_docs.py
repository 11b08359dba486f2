"""What the documentation names is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TESTS = {path.name: path.read_text() for path in ROOT.glob("tests/**/test_*.py")}


@pytest.mark.parametrize(
    "name", ["docs/kernels.md", "docs/lossless.md", "docs/method.md"]
)
def test_tests_that_are_named_exist(name):
    """A file's name holds for the tests listed behind it, until another is named."""
    file, named = None, 0
    for path, test in re.findall(
        r"`(?:tests/)?(?:(test_\w+\.py)(?:::)?)?(test_\w+)?`", (ROOT / name).read_text()
    ):
        file = path or file
        if path or test:
            named += 1
            assert file in TESTS, f"{name} names {file}"
            assert not test or f"def {test}(" in TESTS[file], f"{file} has no {test}"
    assert named > 3
