"""Prompt pruning: one file per `[prune] method`."""
