"""`kvcli profile-heads`."""
