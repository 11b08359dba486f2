"""Products of rows and weights against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from m2r2_jax.models import layers
from m2r2_jax.ops import products
from m2r2_jax.ops.execution import EXACT, PLAIN, Execution

FUSED_16, FUSED_32 = (Execution("fused", registers) for registers in (16, 32))

linear = jax.jit(products.linear, static_argnums=(2, 3))


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("rows", [(), (1,), (2,), (2, 3)])
@pytest.mark.parametrize("out", [(5,), (2, 5), (2, 4, 3)])
def test_linear_contracts_the_last_axis_of_an_out_in_weight(rows, out):
    x, weight = normal(0, *rows, 7), normal(1, *out, 7)
    expected = np.tensordot(np.float64(x), np.float64(weight), axes=(-1, -1))
    result = linear(x, weight)
    assert result.shape == (*rows, *out)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("execution", [FUSED_16, FUSED_32, EXACT])
@pytest.mark.parametrize("out", [(2, 9), (4, 8), (7,)])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 12, 13, 17])
def test_every_way_to_multiply_gives_the_product(rows, out, execution, dtype):
    x, weight = normal(0, rows, 40), jnp.asarray(normal(1, *out, 40), dtype)
    operand = np.float64(jnp.asarray(x, dtype).astype(jnp.float32))
    expected = np.tensordot(operand, np.float64(weight), axes=(-1, -1))
    result = linear(x, weight, execution)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("execution", [PLAIN, FUSED_16, FUSED_32, EXACT])
def test_results_have_the_rows_dtype_or_the_one_asked_for(execution):
    x, weight = jnp.ones((3, 8), jnp.bfloat16), jnp.ones((5, 8), jnp.bfloat16)
    assert linear(x, weight, execution).dtype == jnp.bfloat16
    # 257 needs more bits than bf16 has.
    weight = weight.at[:, 0].set(250)
    np.testing.assert_array_equal(linear(x, weight, execution, jnp.float32), 257.0)


@pytest.mark.parametrize("execution", [PLAIN, FUSED_16, FUSED_32, EXACT])
@pytest.mark.parametrize("outputs", [301, 302, 292])
@pytest.mark.parametrize("rows", [1, 2])
def test_equal_rows_of_a_weight_give_equal_results(rows, outputs, execution):
    """Also where the last ones fill no vector: the lowest of equal logits wins."""
    weight = normal(1, outputs, 48)
    weight[outputs - 33 :] = weight[-1]
    for seed in range(40):
        last = np.asarray(linear(normal(seed, rows, 48), weight, execution))[:, -33:]
        assert (last == last[:, :1]).all()


def test_exact_rows_do_not_depend_on_those_beside_them():
    """Bitwise, whatever their number and place: what the exact mode rests on."""
    x, weight = normal(0, 40, 1536), normal(1, 64, 1536)
    together = np.asarray(linear(x, weight, EXACT))
    for first, rows in [(0, 1), (0, 2), (5, 8), (3, 9), (17, 16), (20, 20)]:
        found = linear(x[first : first + rows], weight, EXACT)
        np.testing.assert_array_equal(found, together[first : first + rows])


def test_linear_is_differentiable_through_its_reshapes():
    weight = normal(1, 2, 5, 7)
    gradient = jax.grad(lambda x: products.linear(x, weight).sum())(jnp.ones((3, 7)))
    expected = np.broadcast_to(weight.sum((0, 1)), (3, 7))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


def test_rows_of_fused_sums_are_computed_once():
    """Not in the loop over the weight: that no division of theirs is left out of its
    fusion is the mark that XLA keeps the rows' maths apart."""
    options = {"xla_cpu_enable_fast_math": True}

    def product(x, scale, weight):
        return linear(layers.rms_norm(x, scale, 1e-5), weight, FUSED_32)

    compiled = jax.jit(product, compiler_options=options).lower(
        *(jnp.ones(shape) for shape in [(8, 64), (64,), (32, 64)])
    )
    computations = compiled.compile().as_text().split("\n\n")
    (loop,) = [text for text in computations if " reduce(" in text and "%slice" in text]
    assert "divide(" not in loop and loop.count(" multiply(") == 8 * 2
