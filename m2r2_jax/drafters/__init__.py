"""Drafters: each one a small static object for the loop of `m2r2_jax.decoding`."""

from m2r2_jax.drafters.multirate_chain import MultiRateChain
from m2r2_jax.drafters.no_drafts import NoDrafts
from m2r2_jax.drafters.prompt_lookup import PromptLookup
from m2r2_jax.drafters.random_draft import RandomDraft

__all__ = ["MultiRateChain", "NoDrafts", "PromptLookup", "RandomDraft"]
