"""Read-only subsets of a KV cache."""
