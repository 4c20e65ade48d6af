"""Drafted reasoning steps: one file per `[steps] method`."""
