"""Drafters' common parts: the protocol, the KV of draft tokens, reports, draft heads."""
