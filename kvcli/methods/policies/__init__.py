"""Eviction policies: one file per `[policy] name`."""
