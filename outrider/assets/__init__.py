"""The embedded pair: a small target and its draft, trained on Python source by this project.

Both are ordinary Hugging Face folders; their model cards say what they were trained on.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["draft_path", "target_path"]


def target_path() -> Path:
    """Folder of the embedded target model."""
    return _folder("target")


def draft_path() -> Path:
    """Folder of the embedded draft model, trained to imitate the target."""
    return _folder("draft")


def _folder(name: str) -> Path:
    folder = Path(str(files(__name__))) / name
    if not (folder / "model.safetensors").exists():
        raise FileNotFoundError(
            f"the embedded {name} model is missing from {folder}; reinstall outrider, "
            "or train it with `python -m recipes.embedded_pair`"
        )
    return folder
