"""Entry of `python -m kvcli` and of the `kvcli` script. Ctrl-C during the imports leaves no traceback."""

import atexit
import os
import sys
from contextlib import suppress


def main() -> None:
    status = [1]
    atexit.register(end_now, status)  # the first one registered runs last, after threads and worker processes ended
    try:
        from kvcli.resident_client import run_in_resident

        if (code := run_in_resident(sys.argv[1:], os.environ)) is not None:
            sys.exit(code)
        from kvcli.cli import main as run

        run()
    except SystemExit as end:
        status[0] = end.code if isinstance(end.code, int) else int(bool(end.code))
        raise
    except KeyboardInterrupt:
        if "--json" in sys.argv:
            from kvcli.resident_client import print_error

            print_error(sys.argv, "interrupted", 130, "interrupted before there was a result")
        else:
            sys.stderr.write("interrupted\n")
        status[0] = 130
        sys.exit(130)


def end_now(status: list[int]) -> None:
    """End the process without freeing each object, which takes a second after torch and transformers were imported."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # started without it, or its reader is gone
            stream.flush()
    os._exit(status[0])


if __name__ == "__main__":
    main()
