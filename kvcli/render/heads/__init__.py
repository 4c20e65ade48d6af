"""Results of `kvcli profile-heads` as text and HTML."""
