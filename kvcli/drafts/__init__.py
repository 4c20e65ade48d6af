"""Drafters: they choose the draft tokens that a forward pass verifies."""
