"""Sparse attention of prompts: one file per `[sparse] method`, and segments, whose rows select pages together."""
