"""Code shared by commands: options, setup, input, output and errors."""
