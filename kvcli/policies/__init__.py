"""Policies: which slots to keep."""
