"""Fails if a tracked text file names a folder of one machine, or the host of a package registry.

Either would make a checkout work in one place only. Prints `file:line: what was found`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

FORBIDDEN = {
    "an absolute path of one machine": re.compile(
        r"(?<![\w.~*<>}-])/(?:home|root|Users|work|farm|tmp|mnt|opt|scratch|private)/[\w.-]"
        r"|\b[A-Z]:\\Users\\"
    ),
    "a package registry's host": re.compile(
        r"\b(?:pypi\.(?:org|io|python\.org)|pythonhosted\.org|download\.pytorch\.org"
        r"|(?:conda\.)?anaconda\.org|registry\.npmjs\.org|(?:deb|security)\.debian\.org"
        r"|archive\.ubuntu\.com)\b",
        re.IGNORECASE,
    ),
}


def tracked_files() -> list[Path]:
    listing = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [Path(name) for name in listing.stdout.split("\0") if name]


def findings(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, FileNotFoundError, IsADirectoryError):
        return []  # binary, or deleted and not yet committed
    if path.name == "tokenizer.json":
        return []  # a vocabulary: learned fragments of text, not addresses
    return [
        f"{path}:{number}: {what}: {match.group()}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN.items()
        if (match := pattern.search(line))
    ]


def main() -> int:
    found = [finding for path in tracked_files() for finding in findings(path)]
    print("\n".join(found), end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
