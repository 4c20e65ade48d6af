"""`python -m kvcli`, and the `kvcli` script: Ctrl-C while the command itself is still imported leaves no traceback."""

import sys


def main() -> None:
    try:
        from kvcli.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
