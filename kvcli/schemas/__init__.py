"""JSON documents that kvcli prints, a file for each command; `documents.py` lists them by name."""
