"""KV formats beyond the default: one file per `[kv_format] method`."""
