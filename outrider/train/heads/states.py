"""The target's hidden states of all samples, computed once and kept on disk in shards.

A shard is a safetensors file with the tokens of some samples one after the other:

    lengths (S)     tokens of each sample
    tokens (T)      int32
    answers (T)     uint8: whether the target wrote the token
    hidden (T, F)   bfloat16: the chosen layers side by side, then the output of the final norm
    log_norm (T)    float32: log Σ exp of the target's logits, over its whole vocabulary

With ``log_norm`` the probability of any token follows from the final hidden state and its row of
the target's output layer, so no distribution over the vocabulary is stored.

A shard's content depends on its number and on what ``contents.json`` records. It is written beside
its name and renamed once it is complete; an interrupted run computes the missing shards only.

Legend: S samples of a shard, B rows, T tokens, H width of the target, F width of the layers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from outrider.runtime import HFModel
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.prefill import unsampled_context
from outrider.train.disk import require_space, writing
from outrider.train.fused_linear_loss import chunk_size
from outrider.train.heads.samples import Sample

SHARD_SAMPLES = 64
"""Samples of a shard: what an interruption costs at most."""
CONTENTS = "contents.json"
_WIDTH = 512  # tokens of a forward pass
_WHAT = "the cache of the target's hidden states"
_REMEDY = "free some, or give --cache a folder on another disk"


@dataclass(frozen=True)
class StateSample:
    """A sample with the target's hidden states.

    Attributes:
        tokens_T: int64.
        answers_T: bool: which tokens the target wrote.
        hidden_TF: the chosen layers side by side.
        final_TH: the output of the final norm, which the output layer reads.
        log_norm_T: log Σ exp of the target's logits.
    """

    tokens_T: Tensor
    answers_T: Tensor
    hidden_TF: Tensor
    final_TH: Tensor
    log_norm_T: Tensor


class States(Sequence[StateSample]):
    """The samples of a folder of shards.

    Args:
        folder: as :func:`compute_states` left it.
    """

    def __init__(self, folder: Path) -> None:
        contents = json.loads((folder / CONTENTS).read_text())
        self.folder = folder
        self.sample_lengths: list[int] = contents["lengths"]
        self._width: int = contents["hidden_size"]
        self._open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.sample_lengths)

    def __getitem__(self, index: int) -> StateSample:  # type: ignore[override]
        shard = index // SHARD_SAMPLES
        if shard not in self._open:
            self._open[shard] = safe_open(_path(self.folder, shard), "pt")
        first = sum(self.sample_lengths[shard * SHARD_SAMPLES : index])
        file, last = self._open[shard], first + self.sample_lengths[index]

        def part(name: str) -> Tensor:
            tensor: Tensor = file.get_slice(name)[first:last]
            return tensor

        both_TF = part("hidden")
        return StateSample(
            part("tokens").long(),
            part("answers").bool(),
            both_TF[:, : -self._width],
            both_TF[:, -self._width :],
            part("log_norm"),
        )

    def token_counts(self, num_tokens: int) -> Tensor:
        """How often the target wrote each token of its vocabulary, (V,)."""
        count_V = torch.zeros(num_tokens, dtype=torch.int64)
        for index in range(len(self)):
            sample = self[index]
            written = sample.tokens_T[sample.answers_T]
            count_V += torch.bincount(written, minlength=num_tokens)
        return count_V


def compute_states(
    target: HFModel,
    samples: Sequence[Sample],
    layers: Sequence[int],
    root: Path,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> States:
    """Computes the shards that a folder below ``root`` lacks, and opens it. The folder's name is a
    hash of the target, the samples and the layers.

    Args:
        target: the model, whose final hidden state must determine its logits.
        samples: all samples.
        layers: whose hidden states the head reads, numbered as in ``ForwardBatch.hidden_layers``.
        root: of all such folders.
        report: called with the number of tokens that are done, and of all.

    Raises:
        DiskFullError: too little room for all shards; says how much is needed.
        ValueError: a target whose logits are more than its output layer times the hidden state.
    """
    width = target.module.config.get_text_config().hidden_size
    contents = {
        "target": _fingerprint(target),
        "layers": list(layers),
        "hidden_size": width,
        "shard_samples": SHARD_SAMPLES,
        "samples": hashlib.sha256(repr(samples).encode()).hexdigest(),
        "lengths": [len(sample.tokens) for sample in samples],
    }
    text = json.dumps(contents)
    folder = root / hashlib.sha256(text.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [
        number
        for number in range((len(samples) + SHARD_SAMPLES - 1) // SHARD_SAMPLES)
        if not _path(folder, number).exists()
    ]
    per_token = 2 * width * (len(layers) + 1) + 4 + 1 + 4
    total = sum(contents["lengths"])
    left = sum(len(s.tokens) for n in missing for s in _members(samples, n))
    if missing:
        require_space(folder, left * per_token, _WHAT, _REMEDY)
    reading = target.with_hidden_states((*layers, target.num_layers))
    if missing:
        _check_output_layer(reading, samples[0])
    done = total - left
    for number in missing:
        members = _members(samples, number)
        _write(_path(folder, number), _shard(reading, members), left * per_token)
        done += sum(len(sample.tokens) for sample in members)
        left = total - done
        report(done, total)
    _replace_text(folder / CONTENTS, text)
    return States(folder)


def output_layer(target: HFModel) -> tuple[Tensor, Tensor | None]:
    """Weight (V, H) and bias (V,) of the target's output layer."""
    head = target.module.get_output_embeddings()
    return head.weight, getattr(head, "bias", None)


def _members(samples: Sequence[Sample], number: int) -> Sequence[Sample]:
    return samples[number * SHARD_SAMPLES : (number + 1) * SHARD_SAMPLES]


@torch.inference_mode()
def _shard(target: HFModel, samples: Sequence[Sample]) -> dict[str, Tensor]:
    parts = [part for sample in samples for part in _passes(target, sample)]
    hidden, log_norm = zip(*parts, strict=True)
    return {
        "lengths": torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int32),
        "tokens": torch.tensor([t for s in samples for t in s.tokens], dtype=torch.int32),
        "answers": torch.tensor([a for s in samples for a in s.answers], dtype=torch.uint8),
        "hidden": torch.cat(hidden).to(torch.bfloat16).cpu(),
        "log_norm": torch.cat(log_norm).cpu(),
    }


def _passes(target: HFModel, sample: Sample) -> Iterator[tuple[Tensor, Tensor]]:
    """Hidden states and log Σ exp of a sample, by forward passes of bounded width."""
    cache = target.without_compiled().start(unsampled_context(target, [sample.tokens[0]]))
    tokens_1T = torch.tensor([sample.tokens], device=target.device)
    for first in range(0, len(sample.tokens), _WIDTH):
        part_1N = tokens_1T[:, first : first + _WIDTH]
        output = target.forward(ForwardBatch(cache, part_1N, hidden_layers=target.hidden_layers))
        cache.append(part_1N.shape[1])
        assert output.hidden_BNH is not None
        yield output.hidden_BNH[0], _log_norm(output.logits_BNV[0])


def _log_norm(logits_NV: Tensor) -> Tensor:
    """log Σ exp of each row, (N,), of a few rows at a time, which stay in the processor's cache."""
    few = logits_NV.split(chunk_size(logits_NV.shape[1], logits_NV.device))
    return torch.cat([rows_CV.float().logsumexp(-1) for rows_CV in few])


@torch.inference_mode()
def _check_output_layer(target: HFModel, sample: Sample) -> None:
    """Raises ValueError unless the logits are the output layer times the last hidden state."""
    cache = target.without_compiled().start(unsampled_context(target, [sample.tokens[0]]))
    tokens_1N = torch.tensor([sample.tokens[:8]], device=target.device)
    output = target.forward(ForwardBatch(cache, tokens_1N, hidden_layers=target.hidden_layers))
    weight_VH, bias_V = output_layer(target)
    assert output.hidden_BNH is not None
    final_NH = output.hidden_BNH[0, :, -weight_VH.shape[1] :]
    made_NV = torch.nn.functional.linear(final_NH, weight_VH, bias_V).float()
    wanted_NV = output.logits_BNV[0].float()
    off = (made_NV - wanted_NV).abs().max() / wanted_NV.abs().max()
    if off > 64 * torch.finfo(target.dtype).eps:
        raise ValueError(
            f"the logits of {target.name} are not its output layer times its last hidden state "
            f"(they differ by {float(off):.2g} of the largest); heads cannot be trained on a model "
            f"that scales or caps its logits"
        )


def _fingerprint(target: HFModel) -> str:
    """A hash of the configuration and of some values of every parameter."""
    digest = hashlib.sha256(target.module.config.to_json_string(use_diff=False).encode())
    for name, parameter in target.module.named_parameters():
        values = parameter.detach().flatten()
        some = values[:: max(1, len(values) // 1024)].float().cpu()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(some.numpy().tobytes())
    return digest.hexdigest()


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.safetensors"


def _write(path: Path, tensors: dict[str, Tensor], needed: int) -> None:
    partial = path.with_suffix(".partial")
    with writing(partial, needed, _WHAT, _REMEDY):
        save_file(tensors, partial)
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
    os.replace(partial, path)


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    os.replace(partial, path)
