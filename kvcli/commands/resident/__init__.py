"""A model that stays loaded, and the commands that are forked from its process."""
