"""Estimate from config.json and file headers, before anything loads, if a model fits a machine under a profile."""
