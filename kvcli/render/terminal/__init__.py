"""Terminal output: text width, colours, tables, the live region."""
