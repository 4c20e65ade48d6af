"""Cache views: read-only subsets of a KV cache."""
