"""GGUF files as models: dequantised once by transformers' reader into a folder that is cached.

A GGUF file holds weights of few bits in blocks with scales. ``transformers`` reads the file's
architecture, tokenizer and weights; the weights become ordinary tensors, in the precision that the
file computes in: float32 and float16 files keep theirs, all others become bfloat16. Its rounding
error, at most 2^-9 of a weight, is at most about half of what 8-bit blocks have lost, and less
beside blocks of fewer bits. The folder is an ordinary model folder, so that every later load takes
no more time than any other model's.
"""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from outrider.cache_folder import cache_folder
from outrider.core.errors import ModelLoadError, UnsupportedModelError

MAGIC = b"GGUF"
_VERSION = 1  # of the converted folders; a change of this file's results changes it
_ALL_FLOAT32, _MOSTLY_FLOAT16 = 0, 1  # general.file_type, from the GGUF specification
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>")
"""Tokens by which chat models end a turn, as llama.cpp knows them. Those that a vocabulary has as
special tokens end its sequences, since a GGUF file names one end token only."""

Converter = Callable[[Path, Path], None]


def is_gguf(source: str | Path) -> bool:
    """Whether a path names a GGUF file."""
    path = Path(os.path.expanduser(source))
    return path.suffix.lower() == ".gguf" and path.is_file()


def folder_of(file: Path, role: str, convert: Converter | None = None) -> Path:
    """The model folder that a GGUF file was converted into; converts it the first time.

    Args:
        file: the GGUF file.
        role: what messages call the model.
        convert: writes a model folder from a file; by default :func:`convert_gguf`.

    Raises:
        ModelLoadError: no GGUF file, a damaged one, a quantisation that cannot be read, no space
            for the folder, or the packages that read GGUF are not installed.
        UnsupportedModelError: an architecture that ``transformers`` does not read from GGUF.
    """
    start = f"cannot load {role} {str(file)!r}: "
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            raise ModelLoadError(f"{start}the file does not begin as GGUF files do")
    folder = cache_folder() / "gguf" / f"{file.stem}-{_key(file)}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{file.stem}-"))
    try:
        (convert or convert_gguf)(file, partial)
        _publish(partial, folder)
    except ModelLoadError as error:
        raise type(error)(f"{start}{error}") from error.__cause__
    except OSError as error:
        raise ModelLoadError(
            f"{start}writing the converted model to {folder.parent} failed ({error.strerror}); it "
            f"takes up to {_converted_bytes(file) / 2**30:.1f} GiB: make room, or choose another "
            f"place by the environment variable OUTRIDER_CACHE"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def convert_gguf(file: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder that ``from_pretrained`` reads.

    Raises:
        ModelLoadError: a damaged file, a quantisation that cannot be read, or missing packages.
        UnsupportedModelError: an architecture that ``transformers`` does not read from GGUF.
    """
    where: dict[str, Any] = {
        "pretrained_model_name_or_path": str(file.parent),
        "gguf_file": file.name,
    }
    try:
        read = AutoModelForCausalLM.from_pretrained(**where, **_dense(), dtype=stored_dtype(file))
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except ImportError as error:
        raise missing_packages() from error
    except Exception as error:  # the readers' own exceptions are of many kinds
        raise _refusal(error) from error
    fields = {
        name: value
        for name, value in read.config.to_dict().items()
        if name not in ("quantization_config", "dtype")
    }
    config = type(read.config)(**fields)
    module: Any = type(read)(config)
    module.to(read.dtype)
    module.load_state_dict(read.state_dict())
    module.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=_end_ids(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dense() -> dict[str, Any]:
    """What asks transformers for dense weights, where it could also keep a file's blocks."""
    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def _key(file: Path) -> str:
    """Names a file's content without reading all of it."""
    stat = file.stat()
    named = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{_VERSION}"
    return hashlib.sha256(named.encode()).hexdigest()[:12]


def _publish(partial: Path, folder: Path) -> None:
    """Moves a finished folder to its place; another process may have been first."""
    try:
        partial.rename(folder)
    except OSError:
        if not (folder / "config.json").exists():
            raise


def stored_dtype(file: Path) -> torch.dtype:
    """The precision in which the converted weights are stored."""
    from gguf import GGUFReader  # an optional dependency

    field = GGUFReader(file).fields.get("general.file_type")
    kind = -1 if field is None else int(field.contents())
    return {_ALL_FLOAT32: torch.float32, _MOSTLY_FLOAT16: torch.float16}.get(kind, torch.bfloat16)


def _end_ids(tokenizer: Any) -> list[int]:
    """The tokens that end a sequence: the file's own, and those by which chat models end a turn."""
    vocabulary = tokenizer.get_vocab()
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    turns = [vocabulary[token] for token in _TURN_ENDS if token in special and token in vocabulary]
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return list(dict.fromkeys([*own, *turns]))


def _converted_bytes(file: Path) -> int:
    """At most what the folder takes: two bytes a weight where the file has four bits or more."""
    return 5 * file.stat().st_size


def missing_packages() -> ModelLoadError:
    """The error of a machine without the packages that read GGUF."""
    return ModelLoadError(
        "reading GGUF needs the packages gguf and accelerate: pip install 'outrider[gguf]'"
    )


def _refusal(error: Exception) -> ModelLoadError:
    """The reader's error with what can be done about it."""
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    if "accelerate is required" in reason or "GGUF>=" in reason:
        return missing_packages()
    if "architecture" in reason and "not supported" in reason:
        return UnsupportedModelError(
            f"{reason.rstrip('.')} by transformers' GGUF reader; take the model's safetensors "
            f"folder or hub id instead"
        )
    return ModelLoadError(
        f"transformers' GGUF reader fails: {type(error).__name__}: {reason}; the file may be "
        f"damaged or its quantisation unknown: get it again, or take another quantisation (Q8_0, "
        f"Q4_K_M) or the model's safetensors folder"
    )
