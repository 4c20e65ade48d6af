"""Profiles and settings: TOML files, sources in order of precedence, and conflicts between settings."""
