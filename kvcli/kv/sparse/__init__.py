"""Sparse attention: rows read the pages of a tier that an index selects."""
