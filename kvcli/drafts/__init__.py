"""Drafters: which rows to try."""
