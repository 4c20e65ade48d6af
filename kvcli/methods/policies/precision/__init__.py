"""Precision budget: an eviction policy that stores slots in 16, 8 or 4 bits, or drops them."""
