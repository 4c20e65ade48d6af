"""Chat turn on the terminal: the status row, the answer and its summary."""
