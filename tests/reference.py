"""The model again, in plain numpy and f64, one head and one stream at a time.

Written from the description of the method, not from the library: separate weights,
interleaving spelled out, no cache, no stacking of rows.
"""

import jax
import numpy as np

from m2r2_jax.models.config import ModelConfig


def layer(tree, index: int):
    """One layer of a stacked pytree, in f64."""
    return jax.tree.map(lambda leaf: np.float64(leaf[index]), tree)


def rms_norm(x, scale, epsilon: float):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + epsilon) * scale


def rotate(x_TH, positions_T, theta: float):
    """Rotates each pair (i, i + H/2) as a complex number."""
    half = x_TH.shape[-1] // 2
    frequency_h = theta ** (-np.arange(half) / half)
    turn_Th = np.exp(1j * np.asarray(positions_T)[:, None] * frequency_h)
    turned_Th = (x_TH[:, :half] + 1j * x_TH[:, half:]) * turn_Th
    return np.concatenate([turned_Th.real, turned_Th.imag], axis=-1)


def attend(q_TH, k_SH, v_SH, mask_TS):
    """One head: every row reads the slots of its mask."""
    out_TH = np.zeros((len(q_TH), v_SH.shape[1]))
    for row, (q_H, mask_S) in enumerate(zip(q_TH, mask_TS, strict=True)):
        scores = k_SH[mask_S] @ q_H / np.sqrt(len(q_H))
        weights = np.exp(scores - scores.max())
        out_TH[row] = weights @ v_SH[mask_S] / weights.sum()
    return out_TH


def silu(x):
    return x / (1 + np.exp(-x))


def block(config: ModelConfig, weights: dict, x_TD, keys_from_TD, accelerators=None):
    """One decoder block; queries from `x`, keys and values from the slow stream.

    Args:
      config: the model.
      weights: one layer's weights in f64.
      x_TD: the stream.
      keys_from_TD: the slow stream at the same depth; `x` itself for the slow one.
      accelerators: one layer's low-rank pairs, for the accelerated stream.
    """
    G, epsilon, theta = config.queries_per_kv, config.norm_epsilon, config.rope_theta
    positions = np.arange(len(x_TD))
    causal = np.tril(np.ones((len(x_TD), len(x_TD)), bool))

    def plus(name, x, product):
        if accelerators is None:
            return product
        pair = accelerators[name]
        return product + x @ pair["down"] @ pair["up"]

    normed = rms_norm(x_TD, weights["attention_norm"], epsilon)
    source = rms_norm(keys_from_TD, weights["attention_norm"], epsilon)
    query_weight = weights["qkv"][:, :G].reshape(-1, config.width)
    queries = plus("q", normed, normed @ query_weight.T)
    heads = []
    for head in range(config.num_heads):
        q_TH = queries[:, head * config.head_dim :][:, : config.head_dim]
        k_TH = source @ weights["qkv"][head // G, G].T
        v_TH = source @ weights["qkv"][head // G, G + 1].T
        q_TH, k_TH = (rotate(x, positions, theta) for x in (q_TH, k_TH))
        heads.append(attend(q_TH, k_TH, v_TH, causal))
    mixed = np.concatenate(heads, axis=-1)
    x_TD = x_TD + plus("o", mixed, mixed @ weights["out"].T)
    normed = rms_norm(x_TD, weights["mlp_norm"], epsilon)
    gate = plus("gate", normed, normed @ weights["gate_up"][0].T)
    up = plus("up", normed, normed @ weights["gate_up"][1].T)
    gated = silu(gate) * up
    return x_TD + plus("down", gated, gated @ weights["down"].T)


def logits(config: ModelConfig, params: dict, tokens_T):
    """Logits `[T, V]` of one sequence from stacked parameters."""
    x_TD = np.float64(params["embed"])[np.asarray(tokens_T)]
    for index in range(config.num_layers):
        weights = layer(params["blocks"], index)
        x_TD = block(config, weights, x_TD, x_TD)
    scale = np.float64(params["final_norm"])
    head = np.float64(params.get("head", params["embed"]))
    return rms_norm(x_TD, scale, config.norm_epsilon) @ head.T


def both_streams(
    config: ModelConfig,
    params: dict,
    accelerators: dict,
    tokens_T,
    state_TD,
    exit_layer: int,
):
    """h[X] and p[X] of one sequence; both trees stacked, `state` feeds the carry."""
    slow_TD = np.float64(params["embed"])[np.asarray(tokens_T)]
    fast_TD = slow_TD + np.float64(state_TD) @ np.float64(accelerators["carry"])
    for index in range(exit_layer):
        weights = layer(params["blocks"], index)
        pairs = layer(accelerators["layers"], index)
        fast_TD = block(config, weights, fast_TD, slow_TD, pairs)
        slow_TD = block(config, weights, slow_TD, slow_TD)
    return slow_TD, fast_TD
