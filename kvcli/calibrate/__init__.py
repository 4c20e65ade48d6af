"""Measure a machine once: pass times by rows and tokens in the KV cache, bandwidths, launch cost."""
