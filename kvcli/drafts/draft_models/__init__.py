"""Draft models: separate models, the target model itself, and heads over its hidden states."""
