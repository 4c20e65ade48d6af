"""Model files: finding, downloading and opening models, their tokenizers and chat templates."""
