"""Measure once what a machine can do: pass times by rows and context, bandwidths, launch cost."""
