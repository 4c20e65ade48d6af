"""Forward passes of a fixed shape, captured once on a GPU and replayed."""
