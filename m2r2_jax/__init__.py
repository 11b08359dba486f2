"""M2R2: multi-rate residuals for efficient transformer inference, in JAX/Flax.

The public names; everything else may change between versions.
"""

from m2r2_jax._version import __version__
from m2r2_jax.answers import Answer

# Text in, text out.
from m2r2_jax.conversation import Chat, chat
from m2r2_jax.generation import (
    Generation,
    Piece,
    generate,
    generate_many,
    stream_generate,
)

# Loading, and decoding with the pieces by hand.
from m2r2_jax.methods import METHODS, Method, build_method
from m2r2_jax.model import Model, load
from m2r2_jax.sampling import SamplingParams
from m2r2_jax.session import Session

__all__ = [
    "METHODS",
    "Answer",
    "Chat",
    "Generation",
    "Method",
    "Model",
    "Piece",
    "SamplingParams",
    "Session",
    "__version__",
    "build_method",
    "chat",
    "generate",
    "generate_many",
    "load",
    "stream_generate",
]
