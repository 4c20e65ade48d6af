"""Summaries as text and HTML."""
