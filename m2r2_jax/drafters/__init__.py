"""Drafters: each one a small static object for the loop of `m2r2_jax.speculative`."""

from m2r2_jax.drafters.multirate_chain import MultiRateChain
from m2r2_jax.drafters.prompt_lookup import PromptLookup
from m2r2_jax.drafters.random_draft import RandomDraft

__all__ = ["MultiRateChain", "PromptLookup", "RandomDraft"]
