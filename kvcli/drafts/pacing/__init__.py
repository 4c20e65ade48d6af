"""Measure whether drafting saves time."""
