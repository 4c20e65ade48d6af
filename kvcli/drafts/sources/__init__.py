"""Draft sources that need no model, and the one that runs a draft model."""
