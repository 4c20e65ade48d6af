"""KV formats: how old slots are stored in fewer bits."""
