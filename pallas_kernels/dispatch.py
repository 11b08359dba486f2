"""Choosing among a kernel's implementations."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax


def dispatch(
    implementations: Mapping[str, Callable], implementation: str | None
) -> jax.Array:
    """Calls the implementation that was named, or what fits the default backend.

    Args:
      implementations: functions of no arguments, by name; "reference" serves all.
      implementation: a name, which never falls back; None takes the default
        backend's kernel, and the reference for what that cannot serve.

    Raises:
      ValueError: an unknown name.
      NotImplementedError: a named kernel cannot serve these arguments.
    """
    if implementation is None:
        backend = jax.default_backend()
        kernel = implementations.get(backend, implementations["reference"])
        try:
            return kernel()
        except NotImplementedError:
            return implementations["reference"]()
    if implementation not in implementations:
        raise ValueError(
            f"implementation {implementation!r} is unknown; choose from "
            f"{', '.join(implementations)}, or None for the backend's own"
        )
    return implementations[implementation]()
