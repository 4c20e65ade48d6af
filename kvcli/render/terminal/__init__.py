"""What is printed on a terminal: text width, colors, tables, the live region."""
