"""Precision budget: a policy that gives slots 16, 8 or 4 bits, or drops them."""
