"""What the GPU kernels share: the one backend they are written for.

Mosaic GPU through `plgpu.kernel`, on Hopper. Pallas on Triton is deprecated from jax
0.11 on and will be removed; `plgpu.kernel` took today's arguments in 0.10.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

try:
    from jax.experimental.pallas import mosaic_gpu as plgpu
except ImportError:  # jaxlib builds without the dialect
    plgpu = None

# Rows of an operand that a warpgroup multiplies at once.
WARPGROUP_ROWS = 64
_OLDEST = (0, 10)


def check_backend() -> None:
    """Raises NotImplementedError where this jax cannot lower the kernels."""
    if plgpu is None or jax.__version_info__ < _OLDEST:
        raise NotImplementedError(
            f"GPU kernels are written for Mosaic GPU as in jax 0.10 and later; this is "
            f"jax {jax.__version__}"
        )


def check_bfloat16(what: str, *arrays) -> None:
    """Raises NotImplementedError for operands that Hopper would round to TF32."""
    if any(array.dtype != jnp.bfloat16 for array in arrays):
        dtypes = ", ".join(str(array.dtype) for array in arrays)
        raise NotImplementedError(
            f"{what} must be bfloat16 on GPU, not {dtypes}: its matrix units would "
            "round f32 to TF32"
        )


def block(shape: tuple[int, int], index_map, dtype):
    """A block in shared memory, tiled and swizzled as matrix units read it."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(shape[-1] * itemsize * 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle // itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.BlockSpec(shape, index_map, transforms=transforms)


def transposed(ref):
    """A view of a matrix in shared memory."""
    return plgpu.transpose_ref(ref, (1, 0))


def whole_blocks(what: str, size: int, block_size: int) -> int:
    """How many blocks a size has.

    Raises:
      NotImplementedError: it has a fraction of one.
    """
    if size % block_size:
        raise NotImplementedError(
            f"{what} {size} must be a multiple of {block_size} on GPU"
        )
    return pl.cdiv(size, block_size)
