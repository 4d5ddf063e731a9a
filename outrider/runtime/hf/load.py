"""Loads models from a local folder or a hub id: safetensors only, and no code that comes with a
model unless the user asks for it.

Sections: load, dtype and device, the vocabulary that draft and target must share.
"""

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from outrider.core.errors import (
    InvalidParameterError,
    ModelLoadError,
    VocabularyMismatchError,
)
from outrider.core.values import check_choice, check_flag, shown
from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.hf.gguf import folder_of, is_gguf
from outrider.runtime.hf.gguf_blocks import keep_blocks
from outrider.runtime.hf.layout import Layout
from outrider.runtime.hf.quantize import KEEP, check_kind, keeps_blocks, quantize
from outrider.runtime.hf.recurrent import RecurrentModel, check_recurrent_config
from outrider.runtime.hf.seq2seq import Seq2SeqModel, check_seq2seq_config
from outrider.runtime.hf.source import check_source, eager, named
from outrider.runtime.hf.support import attention_of, check_config, is_recurrent, takes_masks

_LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError)
_NO_FOLDER = " (there is no such folder here either: check the name, or the network)"
_OTHER_WAYS = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ". There are two ways to this model: the Hugging Face "
    "hub, and the package index, by `make real` in a checkout of Outrider, which writes the folder "
    "runs/smollm2/model",
}
"""Where else models that the documentation names come from, by their hub id."""
_TOKENIZER_FILES = ("tokenizer*", "*vocab*", "*.spm", "spiece.model", "*.tiktoken", "tekken.json")

_DTYPES = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "float64": torch.float64,
}


def load_model(
    source: str | Path | PreTrainedModel | HFModel,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = "auto",
    trust_remote_code: bool = False,
    role: str = "model",
    quantized: str | None = None,
    layout: Layout | None = None,
) -> HFModel:
    """A model ready to score: an :class:`HFModel`, a ``Seq2SeqModel`` for an encoder-decoder, or a
    ``RecurrentModel``.

    Args:
        source: a local folder, a GGUF file (``gguf.py``), a hub id, the name of a draft that comes
            with the package (``embedded:NAME``), or a model in memory, which is used as it is,
            without a tokenizer unless it is an HFModel. Of a result of ``torch.compile`` the
            original module is used.
        dtype: ``bfloat16``, ``float16``, ``float32``, ``float64``; None or ``auto`` takes bfloat16
            where the hardware computes in it, else float32.
        device: ``cpu``, ``cuda``, ``cuda:n``, ``mps``, or ``auto`` (None).
        trust_remote_code: run the Python code that comes with a model.
        role: how messages call it (``target``, ``draft``).
        quantized: a kind of ``runtime/hf/quantize.py``, such as ``int8`` or ``int4``; ``keep`` for
            the blocks of a GGUF file as they are; a model in memory is copied first.
        layout: how the weights are spread (``hf/layout.py``); None puts them all on ``device``.

    Raises:
        ModelLoadError: unknown path or id, no tokenizer, no safetensors weights.
        UnsupportedModelError: a model that cannot be rolled back, or cannot be quantized.
        InvalidParameterError: an unknown dtype, device or kind of quantization.
        MissingTorchaoError: a kind that needs torchao, without it.
    """
    if quantized is not None:
        check_kind(quantized)
    if keeps_blocks(quantized) and not (isinstance(source, str | Path) and is_gguf(source)):
        raise InvalidParameterError(
            f"quantization {quantized!r} keeps the blocks of a GGUF file, and {role} "
            f"{shown(source)} is none: give the path of a .gguf file, or another kind"
        )
    check_flag("trust_remote_code", trust_remote_code)
    chosen = resolve_device(device)
    kind = resolve_dtype(dtype, chosen)
    check_source(source, role)
    if layout is not None:
        layout.check_source(source, role, quantized)
    if isinstance(source, HFModel):
        if quantized is None:
            return source
        module = quantize(copy.deepcopy(source.module), quantized, source.name)
        return type(source)(module, source.tokenizer, source.name)
    if not isinstance(source, str | Path):
        module = eager(source)
        if quantized is not None:
            module = quantize(copy.deepcopy(module), quantized, role)
        return _adapter(module.config)(module, name=role)
    folder = _folder(source, role)
    shared: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    with quiet():
        try:
            config = AutoConfig.from_pretrained(folder, **shared)
            adapter = _adapter(config)
            _CHECKS[adapter](config, type(config).__name__, f"{role} {source}")
            if layout is not None:
                adapter = layout.adapter(config, adapter, f"{role} {source}")
                shared |= layout.arguments()
            two_stacks = config.is_encoder_decoder
            auto: Any = AutoModelForSeq2SeqLM if two_stacks else AutoModelForCausalLM
            loaded: Any = auto.from_pretrained(
                folder,
                config=config,
                dtype=kind,
                use_safetensors=True,
                attn_implementation=_attention(config),
                output_loading_info=True,
                **shared,
            )
        except _LOAD_ERRORS as error:
            remedy = "" if os.path.exists(folder) else _NO_FOLDER + _OTHER_WAYS.get(str(source), "")
            raise ModelLoadError(
                f"cannot load {role} {str(source)!r}: {_reason(error)}{remedy}"
            ) from error
    module, report = loaded
    missing = sorted({*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])})
    if missing:
        raise ModelLoadError(
            f"cannot load {role} {str(source)!r}: {len(missing)} tensors that config.json promises "
            f"are missing or of another shape, such as {missing[0]}; the folder is incomplete"
        )
    tokenizer = load_tokenizer(folder, trust_remote_code=trust_remote_code, role=role)
    if layout is None:
        module = module.to(chosen)
    if keeps_blocks(quantized):
        module = keep_blocks(
            module,
            Path(os.path.expanduser(source)),
            f"{role} {source}",
            rounds_inputs=quantized != KEEP,
        )
    elif quantized is not None:
        module = quantize(module, quantized, f"{role} {source}")
    return adapter(module, tokenizer, f"{role} {source}")


def _adapter(config: PretrainedConfig) -> type[HFModel]:
    """The class that runs a model."""
    if config.is_encoder_decoder:
        return Seq2SeqModel
    return RecurrentModel if is_recurrent(config) else HFModel


_CHECKS = {
    HFModel: check_config,
    RecurrentModel: check_recurrent_config,
    Seq2SeqModel: check_seq2seq_config,
}


def _folder(source: str | Path, role: str) -> str:
    """The folder or hub id to read; a GGUF file's is the folder that it is converted into."""
    if is_gguf(source):
        with quiet():
            return str(folder_of(Path(os.path.expanduser(source)), role))
    return str(named(source) or os.path.expanduser(source))


def _attention(config: PretrainedConfig) -> str | None:
    """The attention implementation to load a model with; None for that of its configuration."""
    if getattr(config.get_text_config(), "attn_logit_softcapping", None):
        return "eager"
    return None if takes_masks(attention_of(config)) else "sdpa"


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device by name; ``auto`` or None takes cuda, then mps, then cpu."""
    if device is None or (isinstance(device, str) and device == "auto"):
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        chosen = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
        raise InvalidParameterError(
            f"device={shown(device)}: must be cpu, cuda, cuda:n, mps or auto"
        )
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise InvalidParameterError(
            f"device={device!r}: {torch.cuda.device_count()} CUDA devices here; use device='auto'"
        )
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise InvalidParameterError(f"device={device!r}: no MPS here; use device='auto'")
    return chosen


def resolve_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype by name; the default is bfloat16 where the hardware computes in it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        check_choice("dtype", dtype, [*_DTYPES, "auto"])
    if dtype in (None, "auto"):
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return _DTYPES[str(dtype)]


def has_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 natively."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, check, bool)() for check in checks)
    return False


def check_vocabularies(target: HFModel, draft: HFModel) -> None:
    """Raises VocabularyMismatchError unless both models give the same ids the same meaning.

    The logits' widths may differ by padding only; the tokenizers' own mappings must be equal.
    """
    if target.tokenizer is not None and draft.tokenizer is not None:
        ours, theirs = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
        if ours != theirs:
            raise VocabularyMismatchError(_difference(ours, theirs))
        smallest = len(ours)
        narrow = min(target.num_tokens, draft.num_tokens)
        if narrow >= smallest:
            return
        raise VocabularyMismatchError(
            f"logits of width {narrow} cannot cover the tokenizer's {smallest} tokens; use a draft "
            f"with the target's tokenizer"
        )
    if target.num_tokens != draft.num_tokens:
        raise VocabularyMismatchError(
            f"target and draft have logits of width {target.num_tokens} and {draft.num_tokens}; "
            f"without tokenizers to compare they must be equal"
        )


def _difference(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    """How two vocabularies differ, counted among the target's tokens, or if the draft has all of
    these and more, among the draft's."""
    whose, one, other = ("target", ours, theirs)
    differing = [token for token in one if other.get(token) != one[token]]
    if not differing:
        whose, one, other = ("draft", theirs, ours)
        differing = [token for token in one if other.get(token) != one[token]]
    example = differing[0]
    return (
        f"target and draft have different vocabularies: {len(differing)} of the {whose}'s "
        f"{len(one)} tokens differ, such as {example!r} (ids {ours.get(example)} and "
        f"{theirs.get(example)}); use a draft with the target's tokenizer, or method='tli' or "
        f"'slem'"
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences progress bars and reports of ``transformers``; errors are raised as exceptions."""
    progress = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if progress:
            transformers_logging.enable_progress_bar()


def load_tokenizer(
    source: str | Path, *, trust_remote_code: bool = False, role: str = "model"
) -> Any:
    """A model's tokenizer, without the model.

    Raises:
        ModelLoadError: no such folder or id, or no tokenizer in it.
    """
    folder = Path(_folder(source, role))
    if folder.is_dir() and not any(
        file for pattern in _TOKENIZER_FILES for file in folder.glob(pattern)
    ):
        raise ModelLoadError(
            f"cannot load the tokenizer of {role} {str(source)!r}: the folder has none; save the "
            f"model's own tokenizer into it (tokenizer.save_pretrained)"
        )
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    except _LOAD_ERRORS as error:
        raise ModelLoadError(
            f"cannot load the tokenizer of {role} {str(source)!r}: {_reason(error)}"
        ) from error


def _reason(error: Exception) -> str:
    """The first line of a library's error, and the remedy if that is on another line."""
    text = str(error).strip() or type(error).__name__
    first = text.splitlines()[0].rstrip(" :")
    if "trust_remote_code=True" in text and "trust_remote_code" not in first:
        return f"{first} If you trust its authors, run it with trust_remote_code=True"
    return first
