"""Results of `kvcli bench` as text, HTML and charts."""
