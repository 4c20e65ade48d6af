"""Layer-wise prefill: the whole prompt through one layer, then the next."""
