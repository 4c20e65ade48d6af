"""Commands of the command line: one file or folder per command."""
