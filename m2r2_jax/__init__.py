"""M2R2: multi-rate residuals for efficient transformer inference, in JAX/Flax.

The public names; everything else may change between versions.
"""

from m2r2_jax._version import __version__
from m2r2_jax.checkpoints.model import Model, load
from m2r2_jax.decoding.settings import SamplingParams

# Loading, and decoding with the pieces by hand.
from m2r2_jax.drafters.methods import METHODS, Method, build_method
from m2r2_jax.serving.answers import Answer

# Text in, text out.
from m2r2_jax.serving.conversation import Chat, chat
from m2r2_jax.serving.generation import (
    Generation,
    Piece,
    generate,
    generate_many,
    stream_generate,
)
from m2r2_jax.serving.session import Session

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
