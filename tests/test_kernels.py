"""The Pallas kernels against numpy in double precision.

Run here: the references, and the TPU kernels step by step ("interpret"), which fills
what blocks have beyond an array with NaNs. With JAX_PLATFORMS=tpu or cuda the same
cases run on the device as well.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    LowRank,
    QTensor,
    decode_attention,
    decode_attention_tpu,
    fast_update,
    fast_update_tpu,
    quantize,
    tpu_layout,
)

IMPLEMENTATIONS = ["reference", "interpret"] + [
    name for name in ("tpu", "gpu") if name == jax.default_backend()
]
# Largest error over the largest result. f32 sums of up to 256 terms; bf16 keeps eight
# bits of the result and of what is rounded on the way (normed rows, latents, weights
# of the softmax).
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2}
# Small blocks: several to each width, and a part of one at its end.
BLOCKS = {
    "interpret": {
        "fast_update": fast_update_tpu.Config(128),
        "decode_attention": decode_attention_tpu.Config(128),
    }
}

# rows, slow, in, out, rank, weight, rows' dtype, place
UPDATES = [
    (2, 1, 64, 128, 4, "float32", "float32", "qkv"),
    (3, 1, 48, 200, 3, "float32", "float32", "out"),
    (5, 2, 96, 320, 4, "float32", "float32", "gate_up"),
    (8, 8, 256, 130, 4, "float32", "float32", "down"),
    (8, 0, 130, 256, 4, "bfloat16", "bfloat16", "qkv"),
    (16, 8, 128, 300, 16, "bfloat16", "bfloat16", "out"),
    (33, 16, 200, 136, 8, "bfloat16", "bfloat16", "gate_up"),
    (128, 64, 64, 192, 4, "bfloat16", "bfloat16", "down"),
    (4, 2, 72, 160, None, "bfloat16", "float32", "down"),
    (2, 1, 64, 256, 4, "int8", "bfloat16", "qkv"),
    (5, 3, 160, 140, 4, "int8", "float32", "gate_up"),
    (33, 32, 96, 384, 2, "int8", "bfloat16", "down"),
]
# sequences, rows, kv heads, group, head width, slots, dtype, mask
ATTENTIONS = [
    (1, 1, 1, 1, 16, 128, "float32", "causal"),
    (2, 2, 3, 3, 64, 300, "float32", "causal"),
    (1, 3, 1, 4, 128, 260, "float32", "tree"),
    (3, 5, 2, 2, 32, 200, "float32", "window"),
    (2, 8, 2, 1, 96, 384, "bfloat16", "tree"),
    (1, 33, 1, 2, 256, 130, "bfloat16", "window"),
    (1, 128, 1, 1, 64, 256, "bfloat16", "causal"),
]


def close(found, expected, dtype) -> bool:
    error = np.abs(np.asarray(found, np.float64) - expected).max()
    return error <= TOLERANCE[dtype] * max(1, np.abs(expected).max())


def update_call(case, seed=0) -> dict:
    """Arguments of `fast_update` for a row of the table."""
    rows, slow, width_in, width_out, rank, weight, dtype, place = case
    rng = np.random.default_rng(seed)

    def draw(*shape, dtype=dtype, spread=1.0):
        return jnp.asarray(spread * rng.normal(size=shape), dtype)

    parts = (2,) if place == "gate_up" else ()
    matrix = draw(*parts, width_out, width_in, dtype="float32", spread=width_in**-0.5)
    call = {
        "x_Ri": draw(rows, width_in),
        "weight": jax.jit(quantize)(matrix)
        if weight == "int8"
        else matrix.astype(weight),
        "slow": slow,
    }
    if rank:
        down = draw(*parts, width_in, rank, spread=width_in**-0.5)
        call["accelerator"] = LowRank(down, draw(*parts, rank, width_out, spread=0.5))
    if place in ("qkv", "gate_up"):
        call["norm_i"] = 1 + draw(width_in, spread=0.1)
    else:
        call["residual_Ro"] = draw(rows, width_out)
    return call


def update_in_numpy(call: dict) -> np.ndarray:
    """What `fast_update` promises, in double precision."""
    double = functools.partial(np.asarray, dtype=np.float64)
    x, weight, slow = double(call["x_Ri"]), call["weight"], call["slow"]
    if isinstance(weight, QTensor):
        weight = weight.dequantize()
    weight = double(weight)
    if "norm_i" in call:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * double(call["norm_i"])
    y = x @ weight.swapaxes(-1, -2)
    if "accelerator" in call:
        down, up = map(double, call["accelerator"])
        y[..., slow:, :] += x[slow:] @ down @ up
    if y.ndim == 3:
        y = y[0] / (1 + np.exp(-y[0])) * y[1]
    return y + double(call.get("residual_Ro", 0.0))


def run(function, call: dict, implementation: str):
    """Calls a kernel as one program; skips what the GPU's says it cannot serve."""
    arrays = {name: leaf for name, leaf in call.items() if name != "slow"}
    try:
        return program(function, implementation, call.get("slow"))(arrays)
    except NotImplementedError as reason:
        if implementation != "gpu":
            raise
        pytest.skip(str(reason))


@functools.cache
def program(function, implementation: str, slow: int | None):
    static = {} if slow is None else {"slow": slow}
    config = BLOCKS.get(implementation, {}).get(function.__name__)
    return jax.jit(
        lambda arrays: function(
            **arrays, **static, implementation=implementation, config=config
        )
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", UPDATES, ids=str)
def test_fast_update_is_what_its_contract_says(case, implementation):
    call = update_call(case)
    found = run(fast_update, call, implementation)
    assert found.dtype == case[6]
    rounded_to = "bfloat16" if "bfloat16" in case else "float32"
    assert close(found, update_in_numpy(call), rounded_to)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_no_accelerator_touches_a_slow_row(implementation):
    call = update_call(UPDATES[1])
    down, up = call.pop("accelerator")
    slow = call["slow"]
    plain = run(fast_update, call, implementation)
    for poison in (1e9, np.inf, np.nan):
        wild = run(
            fast_update,
            {**call, "accelerator": LowRank(down, up * poison)},
            implementation,
        )
        assert np.array_equal(wild[:slow], plain[:slow])
        assert not np.array_equal(wild[slow:], plain[slow:])
    still = {**call, "accelerator": LowRank(down, up * 0)}
    assert np.array_equal(run(fast_update, still, implementation), plain)


def attention_call(case, seed=0) -> dict:
    """Arguments of `decode_attention` for a row of the table.

    Slots outside `start..stop` hold NaNs, in keys and values alike.
    """
    sequences, rows, heads, group, width, slots, dtype, kind = case
    rng = np.random.default_rng(seed)
    stop = rng.integers(slots // 2, slots + 1, sequences)
    start = np.zeros(sequences, int)
    positions = stop[:, None] - rows + np.arange(rows)
    slot = np.arange(slots)
    mask = slot <= positions[..., None]
    if kind == "tree":
        # Behind what is committed, a row sees itself and half of those before it.
        seen = np.eye(rows, dtype=bool) | np.tri(rows, k=-1, dtype=bool) & (
            rng.random((rows, rows)) < 0.5
        )
        for b in range(sequences):
            mask[b, :, stop[b] - rows : stop[b]] = seen
    if kind == "window":
        mask &= slot > positions[..., None] - 20
        start = np.maximum(positions[:, 0] - 19, 0)
    outside = (slot < start[:, None]) | (slot >= stop[:, None])
    cached = rng.normal(size=(2, sequences, heads, slots, width))
    cached[:, np.broadcast_to(outside[:, None], cached.shape[1:4])] = np.nan
    keys, values = cached.reshape(2, sequences * heads, slots, width)
    return {
        "q_BRKGH": jnp.asarray(
            rng.normal(size=(sequences, rows, heads, group, width)), dtype
        ),
        "keys_JSH": jnp.asarray(keys, dtype),
        "values_JSH": jnp.asarray(values, dtype),
        "mask_BRS": jnp.asarray(mask),
        "start_B": jnp.asarray(start),
        "stop_B": jnp.asarray(stop),
    }


def attention_in_numpy(call: dict) -> np.ndarray:
    """Rows one by one over the slots they read, in double precision."""
    q = np.asarray(call["q_BRKGH"], np.float64)
    B, R, K, G, H = q.shape
    keys, values = (
        np.asarray(call[name], np.float64).reshape(B, K, -1, H)
        for name in ("keys_JSH", "values_JSH")
    )
    mask, out = np.asarray(call["mask_BRS"]), np.zeros_like(q)
    for b, row, head in np.ndindex(B, R, K):
        read = mask[b, row]
        scores = q[b, row, head] @ keys[b, head, read].T * H**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[b, row, head] = weights @ values[b, head, read]
    return out.reshape(B, R, K * G * H)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", ATTENTIONS, ids=str)
def test_decode_attention_is_what_its_contract_says(case, implementation):
    call = attention_call(case)
    found = run(decode_attention, call, implementation)
    assert close(found, attention_in_numpy(call), case[6])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_row_that_reads_nothing_is_zero(implementation):
    call = attention_call(ATTENTIONS[1])
    call["mask_BRS"] = call["mask_BRS"].at[0, 1].set(False)
    found = run(decode_attention, call, implementation)
    assert np.array_equal(found[0, 1], np.zeros_like(found[0, 1]))
    assert np.isfinite(found).all()


def test_kernel_of_eight_bits_is_near_the_weight_it_rounds():
    weight = np.random.default_rng(0).normal(size=(2, 6, 40)).astype(np.float32)
    weight[0, 1] = 0
    rounded = jax.jit(quantize)(weight)
    step = np.abs(weight).max(-1, keepdims=True) / 127
    assert (np.abs(rounded.dequantize() - weight) <= step / 2 + 1e-7).all()
    assert rounded.shape == weight.shape


UPDATE, ATTENTION = update_call(UPDATES[0]), attention_call(ATTENTIONS[0])
MISTAKES = [
    (fast_update, {"x_Ri": UPDATE["x_Ri"][:1]}, "2..128"),
    (fast_update, {"slow": 3}, "slow 3"),
    (fast_update, {"weight": UPDATE["weight"][:, 1:]}, "weight"),
    (fast_update, {"weight": UPDATE["weight"].astype("int8")}, "QTensor"),
    (fast_update, {"residual_Ro": jnp.zeros((2, 64))}, "residual"),
    (fast_update, {"norm_i": jnp.zeros(3)}, "norm"),
    (fast_update, {"accelerator": LowRank(*UPDATE["accelerator"][::-1])}, "down"),
    (fast_update, {"implementation": "cuda"}, "choose from"),
    (decode_attention, {"keys_JSH": ATTENTION["keys_JSH"][:, 1:]}, "expected"),
    (decode_attention, {"mask_BRS": jnp.ones((1, 1, 128))}, "mask"),
    (decode_attention, {"q_BRKGH": ATTENTION["q_BRKGH"][0]}, "queries"),
]


@pytest.mark.parametrize(("function", "wrong", "said"), MISTAKES)
def test_mistakes_are_named(function, wrong, said):
    call = UPDATE if function is fast_update else ATTENTION
    with pytest.raises(ValueError, match=said):
        function(**{**call, **wrong})


@pytest.mark.parametrize("module", [fast_update_tpu, decode_attention_tpu])
def test_blocks_are_whole_registers(module):
    with pytest.raises(ValueError, match="multiple of 128"):
        module.Config(100)
    assert module.Config(128) in module.search_space(200)


def test_a_named_kernel_never_falls_back():
    with pytest.raises(NotImplementedError, match="bfloat16|jax 0.10 and later"):
        fast_update(**UPDATE, implementation="gpu")
    call = jax.eval_shape(
        lambda: update_call((128, 64, 2**18, 128, 4) + UPDATES[0][5:])
    )
    with pytest.raises(NotImplementedError, match="MiB of VMEM"):
        jax.eval_shape(
            lambda x, weight: fast_update(x, weight, slow=1, implementation="tpu"),
            call["x_Ri"],
            call["weight"],
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "transposed"),
    [
        ((960, 576), "bfloat16", True),
        ((576, 1536), "bfloat16", False),
        ((640, 640), "bfloat16", False),
        ((2048, 64), "float32", True),
        ((3, 8192, 128), "bfloat16", False),
        ((1536, 576), "int8", True),
    ],
)
def test_the_axis_that_wastes_less_is_minor(shape, dtype, transposed):
    assert tpu_layout.lies_transposed(jax.ShapeDtypeStruct(shape, dtype)) == transposed
