"""Methods, one file each: each is a dataclass whose fields are the keys of its table in a profile."""
