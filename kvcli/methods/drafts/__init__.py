"""Drafting methods: one file per `[spec] method`."""
