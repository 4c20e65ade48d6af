"""Storage of keys and values: floors of the past."""
