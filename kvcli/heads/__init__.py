"""Attention head probes: which tokens a head attends to, what it retrieves, and the loss when its range is restricted.

Heads are KV heads: query heads that share a KV head are measured together, because they share its memory.
"""
