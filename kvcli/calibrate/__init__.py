"""Measure once what a machine can do: pass times by rows and context, bandwidths, launch cost, a bare process."""

from __future__ import annotations

from kvcli.calibrate.run import calibrate, run_calibration
from kvcli.calibrate.store import load_calibration

__all__ = ["calibrate", "load_calibration", "run_calibration"]
