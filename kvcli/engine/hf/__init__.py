"""Models of transformers: how they are probed, entered between layers, and called directly."""
