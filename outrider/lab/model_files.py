"""The files of a model that a user names: whether two names are of the same model, and whether its
weights are the same as before.

Weights are compared by a hash of the model's files: of their sizes, of samples of the weights, and
of the whole of small files. No model is loaded for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from outrider import assets

_EMBEDDED = "embedded"
_SUFFIXES = (".json", ".safetensors", ".gguf", ".bin")
_SMALL = 1 << 20  # bytes of a file that is hashed as a whole
_SAMPLES, _SAMPLE = 256, 4096  # of a larger one


def fingerprint(model: str, role: str) -> str:
    """A hash of a model's files that changes with its weights. Of a hub id it is the id itself:
    the id names the weights."""
    path = _folder(model, role)
    if path is None:
        return f"hub:{model}"
    files = [path] if path.is_file() else sorted(each for each in path.iterdir() if each.is_file())
    digest = sha256()
    for file in files:
        if file.suffix in _SUFFIXES:
            digest.update(f"{file.name} {file.stat().st_size}\0".encode())
            for part in _parts(file):
                digest.update(part)
    return digest.hexdigest()[:24]


def same_model(one: str | None, other: str | None) -> bool:
    """Whether two names are of the same model: equal, or two paths of one folder or file."""
    if one is None or other is None or one == other:
        return one == other
    first, second = Path(one).expanduser(), Path(other).expanduser()
    return first.exists() and second.exists() and first.samefile(second)


def _folder(model: str, role: str) -> Path | None:
    """Where a model's files are; None for a hub id."""
    if model == _EMBEDDED:
        return assets.target_path() if role == "target" else assets.draft_path()
    try:
        embedded = assets.named_path(model)
    except FileNotFoundError:  # of a draft that there is not, which loading it reports
        return None
    if embedded is not None:
        return embedded
    path = Path(model).expanduser()
    return path if path.exists() else None


def _parts(file: Path) -> Iterator[bytes]:
    """The whole of a small file; samples of a large one, its beginning and end among them."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        if size <= _SMALL:
            yield stream.read()
            return
        for number in range(_SAMPLES):
            stream.seek(number * (size - _SAMPLE) // (_SAMPLES - 1))
            yield stream.read(_SAMPLE)
