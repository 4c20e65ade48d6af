"""Version of kvcli."""

__version__ = "0.2.0"
