"""Files that are replaced at once, so that an interruption leaves the old one."""

from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Writes a file of text in UTF-8.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
