"""KV caches made of tiers, and the plan that chooses them."""
