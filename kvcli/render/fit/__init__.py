"""Results of `kvcli fit`."""
