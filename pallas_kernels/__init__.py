"""Fused kernels of multi-rate decoding, each beside its reference in jax.numpy.

Letters in variable names, as in the model: R rows (slow, then fast), i inputs and
o outputs of a weight, P products that share their rows (1, or gate and up), r rank,
B batch, K key/value heads, G queries per key/value head, H head width, S cache slots,
J = B * K.
"""

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.fast_update import LowRank, fast_update
from pallas_kernels.quantized import QTensor, quantize

__all__ = ["LowRank", "QTensor", "decode_attention", "fast_update", "quantize"]
