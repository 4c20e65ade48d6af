"""Whole steps of a text that a smaller model writes and the model accepts: an approximation, which is said."""
