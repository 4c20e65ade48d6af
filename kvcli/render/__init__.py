"""Everything a human sees. No torch; import the file you need."""
