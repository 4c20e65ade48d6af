"""Drafted reasoning steps: one file per `[reasoning_steps] method`."""
