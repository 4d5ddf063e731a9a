"""A draft model as the subject of an adaptation.

Legend: T tokens, P positions, C cells.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from outrider.engine import Engine
from outrider.runtime import HFModel
from outrider.runtime.weights import StagedWeights, plain_weights, staged
from outrider.train.online.collector import TopKRecorder
from outrider.train.online.samples import Sample, log_q_of_cells
from outrider.train.online.settings import Settings
from outrider.train.online.subject import Comparison


class DraftModelStudent:
    """A draft model in training.

    Args:
        module: the model, plain and in float32.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        self.module = module
        self._takes_positions = "logits_to_keep" in inspect.signature(module.forward).parameters

    @property
    def architecture(self) -> str:
        return architecture(self.module)

    def compare(self, sample: Sample) -> Iterator[Comparison]:
        log_p_PC = sample.log_p_PC
        log_q_PC = log_q_of_cells(self._logits(sample), sample)
        yield Comparison(log_p_PC, log_q_PC, log_p_PC.new_zeros(len(log_p_PC)))

    def _logits(self, sample: Sample) -> Tensor:
        """The logits at a sample's positions, (P, V)."""
        table: Any = self.module.get_input_embeddings()
        most = table.weight.shape[0] - 1
        ids_1T = sample.tokens_T.clamp(max=most)[None]  # the target may emit its padding
        positions_P = sample.positions_P
        if self._takes_positions:
            output = self.module(input_ids=ids_1T, use_cache=False, logits_to_keep=positions_P)
            kept_PV: Tensor = output.logits[0]
            return kept_PV
        logits_TV: Tensor = self.module(input_ids=ids_1T, use_cache=False).logits[0]
        return logits_TV[positions_P]


@dataclass(frozen=True)
class DraftModelBlueprint:
    """Builds a draft model to train.

    Attributes:
        kind: its class.
        config: its configuration, with an attention that has gradients.
    """

    kind: type[PreTrainedModel]
    config: PretrainedConfig

    def build(self) -> DraftModelStudent:
        return DraftModelStudent(self.kind(self.config).float())


class DraftModelSubject:
    """A copy of an engine's draft model, whose weights are exchanged.

    Args:
        engine: drafts with the copy once it is adopted.
        draft: the model that the engine drafts with.
    """

    def __init__(self, engine: Engine, draft: HFModel) -> None:
        self._engine, self._draft = engine, draft.with_own_weights()
        self.name = draft.name

    @property
    def architecture(self) -> str:
        return architecture(self._draft.module)

    def blueprint(self) -> DraftModelBlueprint:
        module = self._draft.module
        return DraftModelBlueprint(type(module), _trainable_config(module.config))

    def recorder(self, settings: Settings) -> TopKRecorder:
        num_tokens = min(self._engine.target.num_tokens, self._draft.num_tokens)
        return TopKRecorder(settings.top_k, num_tokens)

    def context(self, settings: Settings) -> int:
        return max(0, min(settings.context, self._draft.limit - settings.span))

    def weights(self) -> dict[str, Tensor]:
        return plain_weights(self._draft.module, self.name)

    def stage(self, weights: Mapping[str, Tensor]) -> StagedWeights:
        return staged(self._draft.module, weights, self.name)

    def adopt(self) -> None:
        self._engine.adopt_draft(self._draft)

    def save(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        with torch.inference_mode(False):
            module = self.blueprint().build().module
            module.load_state_dict(weights)
        module.to(dtype=self._draft.dtype)  # type: ignore[call-arg]
        module.save_pretrained(folder)
        if self._draft.tokenizer is not None:
            self._draft.tokenizer.save_pretrained(folder)


def architecture(module: PreTrainedModel) -> str:
    """What a draft model must share with another for their weights to be exchanged."""
    config: Any = module.config.get_text_config()
    return (
        f"{type(module).__name__} of {config.num_hidden_layers} layers, width "
        f"{config.hidden_size}, vocabulary {config.vocab_size}"
    )


def _trainable_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration with an attention that has gradients, where that of the kernels has
    none."""
    config = copy.deepcopy(config)
    if str(config._attn_implementation).startswith("outrider"):
        config._attn_implementation = "sdpa"
    return config
