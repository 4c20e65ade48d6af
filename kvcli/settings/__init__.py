"""Profiles and settings: TOML, layers, what may stand beside what."""
