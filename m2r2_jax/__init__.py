"""M2R2: multi-rate residuals for efficient transformer inference, in JAX/Flax.

The public names; everything else may change between versions.
"""

from m2r2_jax._version import __version__

# Text in, text out.
from m2r2_jax.generation import Generation, generate

# Loading, and decoding with the pieces by hand.
from m2r2_jax.methods import METHODS, Method, build_method
from m2r2_jax.model import Model, load
from m2r2_jax.session import Answer, Session

__all__ = [
    "METHODS",
    "Answer",
    "Generation",
    "Method",
    "Model",
    "Session",
    "__version__",
    "build_method",
    "generate",
    "load",
]
