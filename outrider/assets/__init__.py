"""What comes with the package: the embedded pair, and heads for models that people know.

The pair is a small target and its draft, trained on Python source by this project. Both are
ordinary Hugging Face folders. A head drafts for a target that the package does not contain; its
name is written ``embedded:NAME``. The model cards say what all of them were trained on.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["HEADS", "draft_path", "head_path", "target_path"]

HEADS = ("smollm2-eagle3",)
"""The heads that come with the package."""
_PREFIX = "embedded:"


def target_path() -> Path:
    """Folder of the embedded target model."""
    return _folder("target")


def draft_path() -> Path:
    """Folder of the embedded draft model, trained to imitate the target."""
    return _folder("draft")


def head_path(source: object) -> Path | None:
    """Folder of an embedded head, from ``embedded:NAME``; None for any other source.

    Raises:
        FileNotFoundError: no such head; lists those that there are.
    """
    if not isinstance(source, str) or not source.startswith(_PREFIX):
        return None
    name = source.removeprefix(_PREFIX)
    if name not in HEADS:
        known = ", ".join(f"{_PREFIX}{each}" for each in HEADS)
        raise FileNotFoundError(f"no head {source!r} comes with outrider; there are: {known}")
    return _folder(f"heads/{name}")


def _folder(name: str) -> Path:
    folder = Path(str(files(__name__))) / name
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(
            f"the embedded {name} model is missing from {folder}; reinstall outrider, "
            "or train it with `python -m recipes.embedded_pair`"
        )
    return folder
