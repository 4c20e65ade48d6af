"""Tiers, each one kind of storage on one device: dense, quantized, host, disk."""
