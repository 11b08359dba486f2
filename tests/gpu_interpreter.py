"""Runs the GPU kernels on CPU, in jax's own interpreter of Mosaic GPU.

The interpreter knows memories, barriers and pipelines, but not every form of the matrix
unit that the kernels use (transposed operands, operands in registers), nor layouts of
registers. Those few operations are replaced by what they mean. So this proves which
blocks are loaded, in what order, and what becomes of them; not what a GPU's compiler
makes of the instructions.
"""

from __future__ import annotations

import contextlib
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from pallas_kernels import decode_attention_gpu, fast_update_gpu, mosaic_gpu


@contextlib.contextmanager
def interpreted():
    """Within it, "gpu" kernels run on CPU; skips the test where jax cannot do that."""
    params = pytest.importorskip("jax._src.pallas.mosaic_gpu.interpret.params")
    with pytest.MonkeyPatch.context() as patch, params.force_gpu_interpret_mode():
        for module in (fast_update_gpu, decode_attention_gpu):
            patch.setattr(module, "plgpu", _stand_in(mosaic_gpu.plgpu, _GPU))
            patch.setattr(module, "pl", _stand_in(pl, _PALLAS))
            patch.setattr(module, "transposed", _Transposed)
        yield


class _Transposed:
    """A view of a ref that is read transposed."""

    def __init__(self, ref):
        self.ref, self.dtype = ref, ref.dtype

    def __getitem__(self, index):
        assert index is ...
        return self.ref[...].T


class _Accumulator:
    """Sums of the matrix unit, in shared memory."""

    def __new__(cls, shape, dtype):
        return mosaic_gpu.plgpu.SMEM(shape, dtype)

    @staticmethod
    def init(value):
        return value


def _wgmma(acc_ref, left, right):
    left, right = (
        x if isinstance(x, jax.Array) else x[...].astype(jnp.float32)
        for x in (left, right)
    )
    acc_ref[...] += jnp.dot(left.astype(jnp.float32), right.astype(jnp.float32))


def _run_scoped(function, *memories, **named):
    """As pallas's; a lone memory of f32 is an accumulator, which begins at 0."""

    def zeroed(*refs, **named_refs):
        if len(refs) == 1 and refs[0].dtype == jnp.float32:
            refs[0][...] = jnp.zeros(refs[0].shape, jnp.float32)
        return function(*refs, **named_refs)

    return pl.run_scoped(zeroed, *memories, **named)


def _run_state(function):
    def run(value):
        def body(ref):
            ref[...] = value
            function(ref)
            return ref[...]

        return pl.run_scoped(body, _Accumulator(value.shape, value.dtype))

    return run


_PALLAS = {"run_scoped": _run_scoped, "run_state": _run_state}
_GPU = {
    "ACC": _Accumulator,
    "wgmma": _wgmma,
    "wgmma_wait": lambda count: None,
    "load": lambda ref, index, **layout: ref[index or ...],
    "layout_cast": lambda value, layout: value,
    "broadcasted_iota": lambda dtype, shape, axis, layout: jax.lax.broadcasted_iota(
        dtype, shape, axis
    ),
}


def _stand_in(module, replaced: dict) -> types.SimpleNamespace:
    """A module's public names, some of them replaced."""
    names = {name: getattr(module, name) for name in dir(module) if name[0] != "_"}
    return types.SimpleNamespace(**names | replaced)
