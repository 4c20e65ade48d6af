"""`python -m kvcli`."""

from kvcli.cli import main

main()
