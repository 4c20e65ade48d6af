"""Reuse of matching spans: one file per `[reuse] method`."""
