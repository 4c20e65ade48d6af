"""Engines of other programs: their chat API, their options, and their metrics."""
