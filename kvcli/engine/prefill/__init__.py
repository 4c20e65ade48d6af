"""Ways to compute the KV of a prompt: layer by layer, pruned, with deferred tokens, from matching spans."""
