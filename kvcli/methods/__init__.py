"""Methods, one file each: dataclasses whose fields are the keys of their table in a profile."""
