"""Meshes, one table from logical axes to mesh axes, and the shardings they give."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from m2r2_jax.models.cache import KVCache

# Every logical axis stands here; an axis that does not is an error, so that a renamed
# weight cannot end up replicated unnoticed.
RULES: dict[str, str | None] = {
    "batch": "data",
    "kv_heads": "model",
    "heads": "model",
    "hidden": "model",
    "vocab": "model",
    "group": None,
    "head": None,
    "halves": None,
    "experts": None,
    "gate": None,
    "slots": None,
    "layers": None,
    "width": None,
}


def make_mesh(text: str) -> Mesh:
    """Builds a mesh from a description such as `data:2` or `data:2,model:4`.

    Raises:
      ValueError: a malformed description, an unknown axis, or more devices than exist.
    """
    known = sorted({axis for axis in RULES.values() if axis})
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.strip().partition(":")
        if name not in known or name in sizes or not size.isdigit() or int(size) < 1:
            raise ValueError(
                f"mesh {text!r}: {part!r} is not AXIS:SIZE with AXIS one of {known}, "
                "each at most once, and SIZE at least 1; write for example data:2"
            )
        sizes[name] = int(size)
    needed, devices = 1, jax.device_count()
    for size in sizes.values():
        needed *= size
    if needed > devices:
        raise ValueError(
            f"mesh {text!r} needs {needed} devices, this process has {devices}; on CPU "
            f"set XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
        )
    # Auto axes: the compiler propagates shardings, as under pjit. Explicit axes are
    # the default of newer versions and would turn our rules into assertions.
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[:needed],
    )


def batch_size(mesh: Mesh | None) -> int:
    """Sequences that decode together so that every data shard holds one."""
    return 1 if mesh is None else mesh.shape.get("data", 1)


def sharding(mesh: Mesh, axes: Sequence[str], shape: Sequence[int]) -> NamedSharding:
    """The sharding of an array with the given logical axes.

    A dimension that its mesh axis does not divide is replicated, with a warning.

    Raises:
      ValueError: an axis without a rule, or two dimensions on one mesh axis.
    """
    spec: list[str | None] = []
    for axis, size in zip(axes, shape, strict=True):
        if axis not in RULES:
            raise ValueError(f"logical axis {axis!r} has no rule in sharding.RULES")
        target = RULES[axis] if RULES[axis] in mesh.shape else None
        if target is not None and target in spec:
            raise ValueError(
                f"logical axes {tuple(axes)}: two dimensions on mesh axis {target!r}"
            )
        if target is not None and size % mesh.shape[target]:
            warnings.warn(
                f"{axis} of size {size} is not divisible by mesh axis "
                f"{target!r} of size {mesh.shape[target]}: replicated",
                stacklevel=2,
            )
            target = None
        spec.append(target)
    return NamedSharding(mesh, PartitionSpec(*spec))


def place(mesh: Mesh | None, tree, axes: Sequence[str] = ()):
    """Puts arrays on the default device, or over a mesh.

    Args:
      mesh: None for a single device.
      tree: a pytree of numpy or jax arrays.
      axes: logical names of their axes; by default the first one is the batch.
    """

    def put(array):
        if mesh is None:
            return jnp.asarray(array)
        names = axes or batch_axes(array)
        return jax.device_put(array, sharding(mesh, names, array.shape))

    return jax.tree.map(put, tree)


def batch_axes(array) -> tuple[str, ...]:
    """Logical axes of an array whose first one is the batch."""
    return ("batch",) + ("slots",) * (array.ndim - 1)


def cache_shardings(mesh: Mesh, cache: KVCache) -> KVCache:
    """Shardings of a key/value cache, unrolled or stacked."""

    def buffer(leaf):
        axes = ("layers", "batch", "slots", "head")[-leaf.ndim :]
        return sharding(mesh, axes, leaf.shape)

    keys, values = jax.tree.map(buffer, (cache.keys, cache.values))
    return KVCache(keys, values, sharding(mesh, ("batch",), cache.length.shape))
