"""Eviction policies choose the slots of the KV cache to keep."""
