"""The console script, and ``python -m outrider``."""

import sys

from outrider.imports.garbage import end_without_collection


def main() -> None:
    """Runs the command line; Ctrl-C ends it quietly even while it is still being imported."""
    end_without_collection()
    try:
        from outrider.cli import main as run

        run()
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
