"""Models in the shapes of published ones, without their weights, and the embedded pair.

random     the shape with its own vocabulary and random weights, which are made on the device in
           their precision. Only the time of passes is meaningful
inflated   the embedded pair with parameters that contribute nothing (benchmarks.inflate):
           the outputs and the acceptance of the small pair at the cost of a large one, with a
           vocabulary of 6144 tokens and heads of 64. Made on the host, which needs as much free
           memory as the model takes on the device
embedded   the embedded pair as it is
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.inflate import Shape, inflate
from outrider import assets
from outrider.runtime import HFModel, load_model

_STD = 0.02


@dataclass(frozen=True)
class Llama:
    """A shape of the Llama architecture with random weights."""

    name: str
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    mlp: int
    context: int = 2048
    vocabulary: int = 32000
    tied: bool = False

    def config(self) -> LlamaConfig:
        """The shape as a ``transformers`` config."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_value_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            bos_token_id=None,
            eos_token_id=None,
        )

    def build(self, device: torch.device, dtype: torch.dtype) -> HFModel:
        """The model, with weights made on the device."""
        with torch.device(device):
            module = AutoModelForCausalLM.from_config(self.config(), dtype=dtype)
        generator = torch.Generator(device).manual_seed(self.layers)
        with torch.no_grad():
            for parameter in module.parameters():
                if parameter.dim() > 1:  # norm weights stay ones
                    parameter.normal_(std=_STD, generator=generator)
        return HFModel(module, name=self.name)


@dataclass(frozen=True)
class Inflated:
    """A model of the embedded pair in another shape."""

    name: str
    shape: Shape
    source: Callable[[], Path]

    def build(self, device: torch.device, dtype: torch.dtype) -> HFModel:
        """The model with its tokenizer."""
        small = load_model(self.source(), dtype=dtype, device=str(device))
        return HFModel(inflate(small.module, self.shape), small.tokenizer, self.name)


@dataclass(frozen=True)
class Embedded:
    """A model of the embedded pair."""

    name: str
    source: Callable[[], Path]

    def build(self, device: torch.device, dtype: torch.dtype) -> HFModel:
        """The model with its tokenizer."""
        loaded = load_model(self.source(), dtype=dtype, device=str(device))
        return HFModel(loaded.module, loaded.tokenizer, self.name)


@dataclass(frozen=True)
class Group:
    """A target and the drafts that it is measured with.

    Attributes:
        target: the target.
        drafts: the draft models.
        trained: whether they are trained, so that acceptance is meaningful.
    """

    target: Llama | Inflated | Embedded
    drafts: tuple[Llama | Inflated | Embedded, ...]
    trained: bool = False

    def among(self, names: Sequence[str] | None) -> "Group":
        """The group with the drafts of these names only, or with all of its drafts if it has none
        of these, or for None."""
        drafts = tuple(draft for draft in self.drafts if draft.name in (names or ()))
        return replace(self, drafts=drafts) if drafts else self


LLAMA_7B = Llama("Llama-2 7B", 4096, 32, 32, 32, 11008, context=4096)
LLAMA_13B = Llama("Llama-2 13B", 5120, 40, 40, 40, 13824, context=4096)
SMOLLM2 = Llama("SmolLM2 135M", 576, 30, 9, 3, 1536, context=8192, vocabulary=49152, tied=True)
SMOLLM2_DRAFT = Llama("SmolLM2's draft", 144, 4, 3, 1, 384, 8192, vocabulary=49152, tied=True)
DRAFTS = (
    Llama("Llama 68M", 768, 2, 12, 12, 3072),
    Llama("Llama 160M", 768, 12, 12, 12, 3072),
    Llama("TinyLlama 1.1B", 2048, 22, 32, 4, 5632),
)
INFLATED_DRAFTS = (
    Inflated("embedded, as 68M", Shape(768, 2, 6, 3072), assets.draft_path),
    Inflated("embedded, as 160M", Shape(768, 12, 6, 3072), assets.draft_path),
    Inflated("embedded, as 1.1B", Shape(2048, 22, 16, 5632), assets.draft_path),
)
_INFLATED_7B = Inflated("embedded, as 7B", Shape(4096, 32, 32, 11008), assets.target_path)
_TINY = Llama("tiny", 64, 2, 4, 2, 128, context=512, vocabulary=256)
_TINY_DRAFT = Llama("tiny draft", 32, 1, 2, 2, 64, context=512, vocabulary=256)
_TINY_INFLATED = Inflated("embedded draft, wider", Shape(320, 2, 2, 960), assets.draft_path)
_TINY_INFLATED_DRAFT = Inflated("embedded draft", Shape(256, 1, 2, 896), assets.draft_path)

SHAPES: dict[str, tuple[Group, ...]] = {
    "7b": (Group(LLAMA_7B, DRAFTS),),
    "13b": (Group(LLAMA_13B, DRAFTS),),
    "smollm2": (Group(SMOLLM2, (SMOLLM2_DRAFT,)),),
    "embedded": (
        Group(
            Embedded("embedded target", assets.target_path),
            (Embedded("embedded draft", assets.draft_path),),
            trained=True,
        ),
    ),
    "inflated": (Group(_INFLATED_7B, INFLATED_DRAFTS, trained=True),),
    "tiny": (
        Group(_TINY, (_TINY_DRAFT,)),
        Group(_TINY_INFLATED, (_TINY_INFLATED_DRAFT,), trained=True),
    ),
}
FOR_GPUS = ("7b", "13b", "smollm2", "embedded")
