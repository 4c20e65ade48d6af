"""Draft sources that need no model, and the draft source that runs a draft model."""
