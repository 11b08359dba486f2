"""Files that are replaced at once, and JSON lines."""

import json
import lzma

import pytest

from m2r2_jax.files import read_json_lines, replacing, write_text


def test_a_file_is_old_or_new_and_never_half(tmp_path):
    path = tmp_path / "below" / "a.txt"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_strings_may_hold_any_line_separator(tmp_path, suffix):
    rows = [{"text": f"a{mark}b"} for mark in "\u2028\u2029\x85\x0b\x0c\r\n"]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path = tmp_path / f"a{suffix}"
    with (lzma.open if suffix == ".jsonl.xz" else open)(path, "wb") as file:
        file.write(text.encode())
    assert list(read_json_lines(path)) == rows
