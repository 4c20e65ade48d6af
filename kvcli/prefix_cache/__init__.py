"""Prefix cache on disk: KV caches found by the tokens they belong to."""
