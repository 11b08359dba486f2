"""A model's whole programs with abstract arguments: no weights are needed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from experiments.compiled import Program
from experiments.kernel_shapes import LLAMA_3_8B, SMOLLM2
from m2r2_jax.decoding import loop, passes
from m2r2_jax.decoding.adjustments import Adjustments
from m2r2_jax.decoding.drafting import Drafter
from m2r2_jax.decoding.sampling import Sampling
from m2r2_jax.decoding.settings import SamplingParams
from m2r2_jax.decoding.state import DecodeState, Trace
from m2r2_jax.drafters import MultiRateChain, NoDrafts
from m2r2_jax.drafters.draft_head import DraftHead, draft_head
from m2r2_jax.models.cache import init_cache
from m2r2_jax.models.config import Decoder, ModelConfig
from m2r2_jax.models.multirate import MultiRateConfig, init_accelerators
from m2r2_jax.models.transformer import init_params, like_matrices, unroll
from m2r2_jax.ops.execution import PLAIN, Execution
from m2r2_jax.training.losses import Batch
from m2r2_jax.training.steps import TrainConfig, init_state, train_step

_DTYPE = jnp.bfloat16
_KERNELS = Execution(kernels="tpu")
# The blocks' matrices, which alone are narrow in training.
_MATRICES = ("qkv", "out", "gate_up", "down")
_SLOTS, _HEAD_IDS = 4096, 16_384
_DRAFTS, _RATES = 4, MultiRateConfig(exit_layer=2, rank=64)
_BATCH, _TOKENS = 8, 1024


def model_programs(
    small: ModelConfig = SMOLLM2, large: ModelConfig = LLAMA_3_8B
) -> list[Program]:
    """Prefill, a plain step, a round and a training step; a round of a large model."""
    chain = MultiRateChain(_RATES.exit_layer, _DRAFTS)
    name = f"round of {_DRAFTS} drafts"
    return [
        _prefill(small),
        _decode("plain step", small, NoDrafts(), {}),
        _decode(name, small, chain, _stream(small)),
        _decode(name, small, chain, _stream(small), _KERNELS),
        _train_step(small),
        _decode(name, large, chain, _stream(large), _KERNELS),
    ]


def _prefill(config: ModelConfig) -> Program:
    def arguments():
        cache = init_cache(config, 1, _SLOTS, _DTYPE, unrolled=False)
        hidden_BD = jnp.zeros((1, config.width), _DTYPE)
        tokens_BC = jnp.zeros((1, passes.PREFILL_CHUNK), jnp.int32)
        return cache, hidden_BD, tokens_BC, jnp.zeros((1,), jnp.int32)

    def lower(given):
        params, rest = given
        return passes.prefill.lower(Decoder(config), params, *rest)

    given = _model(config), jax.eval_shape(arguments)
    return Program(f"{config.name} prefill of {passes.PREFILL_CHUNK}", lower, given)


def _decode(
    name: str,
    config: ModelConfig,
    drafter: Drafter,
    extra: dict,
    execution: Execution = PLAIN,
) -> Program:
    """Rounds of one conversation, in the loop that runs them."""

    def lower(given):
        return loop.decode.lower(Decoder(config, execution), drafter, *given)

    params, unrolled = {"model": _model(config), **extra}, execution.kernels is not None
    if unrolled:
        params = jax.eval_shape(_unrolled, params)
    state = jax.eval_shape(lambda: _state(config, drafter, unrolled))
    given = params, state, jax.ShapeDtypeStruct((), jnp.int32)
    name += ", kernels" if execution.kernels else ""
    return Program(f"{config.name} {name}", lower, given)


def _train_step(config: ModelConfig) -> Program:
    train = TrainConfig(steps=1000)

    def arguments():
        state = init_state(config, _RATES, train, jax.random.key(0))
        rows = (_BATCH, _TOKENS)
        batch = Batch(
            tokens=jnp.zeros(rows, jnp.int32),
            segment=jnp.zeros(rows, jnp.int16),
            position=jnp.zeros(rows, jnp.int32),
            trained=jnp.zeros(rows, bool),
            states=jnp.zeros((*rows, config.width), _DTYPE),
            argmax=jnp.zeros(rows, jnp.int32),
        )
        return state, batch

    def lower(given):
        return train_step.lower(config, _RATES, train, *given)

    # The stream is f32: the teacher's states enter it so.
    params = _model(config, jnp.float32)
    head = jax.eval_shape(lambda params: _head(config, params), params)
    given = params, head, *jax.eval_shape(arguments)
    name = f"{config.name} training step, {_BATCH} x {_TOKENS} tokens"
    return Program(name, lower, given)


def _unrolled(params: dict) -> dict:
    """With a dict per layer, as `load` stores them for kernels: a kernel would have
    each layer sliced off a stack first.
    """
    model, stream = params["model"], params["accelerators"]
    model = {**model, "blocks": unroll(model["blocks"])}
    stream = {**stream, "layers": unroll(stream["layers"])}
    return {**params, "model": model, "accelerators": stream}


def _state(config: ModelConfig, drafter: Drafter, unrolled: bool) -> DecodeState:
    """The state of one conversation, as `Engine.begin` makes it."""
    params = [SamplingParams()]
    history_BS = jnp.zeros((1, _SLOTS), jnp.int32)
    has_carry = isinstance(drafter, MultiRateChain)
    return DecodeState(
        cache=init_cache(config, 1, _SLOTS, _DTYPE, unrolled=unrolled),
        history=history_BS,
        limit=jnp.zeros((1,), jnp.int32),
        done=jnp.zeros((1,), bool),
        eos=jnp.zeros((1,), jnp.int32),
        sampling=Sampling.stack(params),
        adjustments=Adjustments.stack(params, [1]),
        scored=jnp.zeros((), bool),
        scores=jnp.zeros(history_BS.shape),
        trace=Trace.empty(*history_BS.shape),
        drafter=jnp.zeros((1, config.width), _DTYPE) if has_carry else (),
    )


def _model(config: ModelConfig, stream_dtype=_DTYPE) -> dict:
    """Abstract parameters, stacked over layers, matrices in bf16."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))

    def cast(path, leaf):
        is_matrix = path[-1].key in _MATRICES
        return jax.ShapeDtypeStruct(leaf.shape, _DTYPE if is_matrix else stream_dtype)

    return jax.tree_util.tree_map_with_path(cast, shapes)


def _stream(config: ModelConfig) -> dict:
    """Abstract parameters of the accelerated stream and its head."""

    def make(params):
        accelerators = init_accelerators(config, _RATES, jax.random.key(0))
        accelerators = like_matrices(params, accelerators)
        return {"accelerators": accelerators, "head": _head(config, params)}

    return jax.eval_shape(make, _model(config))


def _head(config: ModelConfig, params: dict) -> DraftHead:
    """A reduced draft head."""
    ids = jnp.arange(min(_HEAD_IDS, config.vocab_size))
    return draft_head(config, params, ids)
