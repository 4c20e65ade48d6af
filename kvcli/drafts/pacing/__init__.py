"""Measuring whether drafts are worth their time."""
