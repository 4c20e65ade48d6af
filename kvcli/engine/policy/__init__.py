"""Eviction policies' common parts: the protocol, compression points, recorded queries."""
