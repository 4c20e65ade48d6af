"""Shared parts of score-based eviction policies: slot selection, score stages, head budgets."""
