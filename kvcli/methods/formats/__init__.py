"""KV formats beyond the default: one file per `[form] method`."""
