"""Token pruning of prompts: one file per `[prune] method`."""
