"""Damaged GGUF files: they load, or they raise what a user's mistake raises."""

import dataclasses
import re
import struct
import tracemalloc
import warnings

import numpy as np
import pytest
from conftest import TINY, tiny_params
from gguf_files import spoil_tensor, tensors_of, write
from tiny_chat import METADATA

from m2r2_jax.checkpoints.gguf import describe, load_gguf_params
from m2r2_jax.checkpoints.gguf_file import GGUFFile
from m2r2_jax.text.tokenizer import Tokenizer

CONFIG = dataclasses.replace(
    TINY, num_layers=2, width=16, hidden_width=16, num_heads=2, num_kv_heads=1
)
COPIES = 2000
ALLOWANCE = 1 << 18  # bytes, for what does not grow with the file


def load_on_host(path) -> None:
    """All that `load` does but for placing arrays on a device."""
    file = GGUFFile(path)
    config, vocabulary = describe(file)
    Tokenizer(vocabulary).encode("hello")
    place = lambda array, axes: array  # noqa: E731
    load_gguf_params(file, config, np.float32, unrolled=True, place=place)


def damaged(
    rng: np.random.Generator, content: bytes, header: int, keys: list[int]
) -> bytes:
    """A copy with one to four damages, most of them in the header.

    Args:
      rng: decides where and which.
      content: of the sound file.
      header: its length in bytes.
      keys: where the names of its keys begin.
    """
    data = bytearray(content)
    for _ in range(rng.integers(1, 5)):
        limit = header if rng.random() < 0.9 else len(content)
        at = int(rng.integers(limit))
        match rng.integers(5):
            case 0:
                data[at : at + 1] = bytes([rng.integers(256)])
            case 1:
                data[at : at + 8] = rng.bytes(8)
            case 2:  # a huge length
                data[at : at + 8] = struct.pack("<Q", 1 << int(rng.integers(20, 64)))
            case 3:  # another type for a key's value
                at = int(rng.choice(keys))
                end = at + struct.unpack_from("<Q", content, at - 8)[0]
                data[end : end + 4] = struct.pack("<I", int(rng.integers(14)))
            case 4:
                del data[int(rng.integers(len(content))) :]
    return bytes(data)


def test_damaged_files_load_or_are_a_users_mistake(tmp_path):
    path = tmp_path / "tiny.gguf"
    write(path, CONFIG, tensors_of(CONFIG, tiny_params(CONFIG)), metadata=METADATA)
    content = path.read_bytes()
    load_on_host(path)
    spoil_tensor(path, "blk.0.ffn_up.weight", kind=99)
    with pytest.raises(ValueError, match="type 99"):
        load_on_host(path)  # the gguf package now has its tables of all types
    header = content.rindex(b".weight") + 64
    keys = [match.start() for match in re.finditer(rb"llama\.|tokenizer\.", content)]
    rng = np.random.default_rng(0)
    loaded = 0
    tracemalloc.start()
    try:
        for _ in range(COPIES):
            copy = damaged(rng, content, header, keys)
            path.write_bytes(copy)
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with warnings.catch_warnings(action="ignore"):
                try:
                    load_on_host(path)
                except ValueError as error:
                    assert "tiny.gguf" in str(error)
                    _, peak = tracemalloc.get_traced_memory()
                    assert peak - before < 1.5 * len(copy) + ALLOWANCE
                else:
                    loaded += 1
    finally:
        tracemalloc.stop()
    assert 0 < loaded < COPIES / 2
