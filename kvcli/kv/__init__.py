"""KV caches: slots, tiers, KV formats, offloading, sparse attention and cache views."""
