"""Models that draft: separate ones, the target itself, and heads over its hidden states."""
