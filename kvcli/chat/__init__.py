"""A model as people use it: texts, turns, conversations."""
