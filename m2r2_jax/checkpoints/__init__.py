"""Files to models: GGUF, trained accelerators, the default model's download."""
