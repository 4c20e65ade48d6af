"""Finding, fetching and opening models; their tokenizers and templates."""
