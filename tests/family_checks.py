"""What a family's tiny model computes, to be compared with transformers."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from m2r2_jax.checkpoints.hugging_face import SafetensorsFolder, load_folder_params
from m2r2_jax.decoding import passes
from m2r2_jax.models import sharding, transformer
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder, ModelConfig

FOLDER = Path(__file__).parent / "golden" / "families"
TOLERANCE = 1e-4
# Rows of the two passes over the cache; the second text is shorter by seven.
CHUNK, NEW, SHORTER = 16, 8, 7


@functools.cache
def load_family(path: Path, unrolled: bool = False) -> tuple[ModelConfig, dict]:
    return load_folder_params(
        SafetensorsFolder(path),
        jnp.float32,
        unrolled=unrolled,
        stream_dtype=jnp.float32,
        place=functools.partial(sharding.place, None),
    )


def golden(path: Path) -> dict[str, np.ndarray]:
    return load_file(path / "logits.safetensors")


@functools.partial(jax.jit, static_argnames="config")
def uncached(config: ModelConfig, params: dict, tokens, position):
    """Logits of whole rows at these positions."""
    count = tokens.shape[1]
    causal = jnp.tril(jnp.ones((1, count, count), bool))
    rows = transformer.rows_at(config, position, position, causal)
    x = transformer.embed(config, params, tokens)
    decoder = Decoder(config)
    x, _ = transformer.run_layers(
        decoder, params["blocks"], x, rows, None, 0, config.num_layers
    )
    state = transformer.final_norm(config, params, x)
    return transformer.unembed(decoder, params, state)


@functools.partial(jax.jit, static_argnames="config")
def cached(config: ModelConfig, params: dict, tokens):
    """Logits of the last rows of texts of different lengths, in two passes."""
    decoder, lengths = Decoder(config), jnp.array([CHUNK, CHUNK - SHORTER])
    unrolled = isinstance(params["blocks"], tuple)
    cache = init_cache(config, 2, 32, jnp.float32, unrolled=unrolled)
    offset, causal = np.arange(CHUNK), np.tril(np.ones((CHUNK, CHUNK), bool))
    first = tokens[:, :CHUNK]
    _, _, cache = passes.score(decoder, params, cache, first, offset, causal)
    cache = cache.advance(lengths)
    index = lengths[:, None] + jnp.arange(NEW)
    rest = jnp.take_along_axis(tokens, index, axis=1)
    rows = rest, offset[:NEW], causal[:NEW, :NEW]
    return passes.score(decoder, params, cache, *rows)[1]


def assert_uncached_is(path: Path, found: dict[str, np.ndarray]) -> None:
    config, params = load_family(path)
    tokens = found["tokens"].astype(np.int32)
    logits = uncached(config, params, tokens, np.arange(tokens.shape[1])[None])
    np.testing.assert_allclose(logits, found["logits"], atol=TOLERANCE)
    assert np.std(found["logits"]) > 0.1


def assert_cached_is(path: Path, found: dict[str, np.ndarray]) -> None:
    config, params = load_family(path, unrolled=True)
    logits = cached(config, params, found["tokens"].astype(np.int32))
    for row, start in enumerate((CHUNK, CHUNK - SHORTER)):
        expected = found["logits"][row, start : start + NEW]
        np.testing.assert_allclose(logits[row], expected, atol=TOLERANCE)
