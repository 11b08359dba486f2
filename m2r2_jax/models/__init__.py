"""The transformer, its accelerated stream, its cache, and how both are sharded."""
