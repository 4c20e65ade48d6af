"""Terminal and HTML output for users. No torch; import the file you need."""
