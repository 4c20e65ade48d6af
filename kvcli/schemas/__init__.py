"""The JSON documents kvcli prints, a file for each command; `documents.py` lists them by name."""
