"""What comes with the package: the embedded pair, and drafts for models that people know.

The pair is a small target and its draft, trained on Python source by this project. Both are
ordinary Hugging Face folders. Other drafts, heads among them, are for a target that the package
does not contain; their names are written ``embedded:NAME``. The model cards say what all of them
were trained on.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["NAMED", "draft_path", "named_path", "target_path"]

NAMED = {"smollm2-eagle3": "heads/smollm2-eagle3", "smollm2-draft": "drafts/smollm2-draft"}
"""The drafts that come with the package for other targets, and their folders."""
_PREFIX = "embedded:"


def target_path() -> Path:
    """Folder of the embedded target model."""
    return _folder("target")


def draft_path() -> Path:
    """Folder of the embedded draft model, trained to imitate the target."""
    return _folder("draft")


def named_path(source: object) -> Path | None:
    """Folder of a draft for another target, from ``embedded:NAME``; None for any other source.

    Raises:
        FileNotFoundError: there is none of that name; lists those that there are.
    """
    if not isinstance(source, str) or not source.startswith(_PREFIX):
        return None
    folder = NAMED.get(source.removeprefix(_PREFIX))
    if folder is None:
        known = ", ".join(f"{_PREFIX}{each}" for each in NAMED)
        raise FileNotFoundError(f"no draft {source!r} comes with outrider; there are: {known}")
    return _folder(folder)


def _folder(name: str) -> Path:
    folder = Path(str(files(__name__))) / name
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(
            f"the embedded {name} model is missing from {folder}; reinstall outrider, "
            "or train it with `python -m recipes.embedded_pair`"
        )
    return folder
