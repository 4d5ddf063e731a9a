"""The console script, and ``python -m outrider``."""

import os
import sys

from outrider.imports.garbage import end_without_collection


def replace_closed_streams() -> None:
    """Opens the null device for each standard stream that the caller has closed, as a service
    manager may: Python has None there, and the first file to be opened would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def main() -> None:
    """Runs the command line; Ctrl-C ends it quietly even while it is still being imported."""
    end_without_collection()
    replace_closed_streams()
    try:
        from outrider.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
