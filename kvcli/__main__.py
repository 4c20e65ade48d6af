"""Entry of `python -m kvcli` and of the `kvcli` script. Ctrl-C during the imports leaves no traceback."""

import sys

ERROR = (  # the JSON of commands/common/exits.py, which is not imported yet
    '{"schema": "kvcli.error/1", "code": "interrupted", "exit": 130, "message": "interrupted before there was a result"'
    ', "lines": [], "detail": {}, "try": []}'
)


def main() -> None:
    try:
        from kvcli.cli import main as run

        run()
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            print(f'{{"event": "error", "error": {ERROR}}}' if "--stream" in sys.argv else ERROR)
        else:
            sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
