"""Benchmarks: speed, memory and text agreement of several sides on the same prompts, interleaved in one run."""
