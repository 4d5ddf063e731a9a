"""Writes the fixtures of heads in `tests/drafters/fixtures`, with the published package itself.

Run by hand, in an environment of its own that has `speculators` 0.9.0 (its dependencies `datasets`,
`hs_connectors` and `openai` are not needed and may be absent):

    python scripts/speculators_fixtures.py

Each folder holds a random tiny checkpoint as the package saves it; the file beside it holds inputs
and the package's own logits for them. The suite compares ours with these; it does not need
the package.

Legend: T tokens, F fused hidden width, D draft vocabulary.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from safetensors.torch import save_file
from torch import Tensor

FOLDER = Path(__file__).parents[1] / "tests" / "drafters" / "fixtures"
VOCAB, DRAFT_VOCAB, WIDTH, LAYERS, TOKENS, STEPS = 40, 24, 16, [1, 2, 3], 9, 3
MASK = 38
UNUSED = ("datasets", "hs_connectors", "openai")
EAGLE3 = {
    "eagle3": {"norm_before_residual": True},
    "eagle3-post-norm": {"norm_before_fc": True, "norm_output": True},
    "eagle3-fc-norm": {"fc_norm": True},
    "eagle3-qwen3": {"norm_before_residual": True},
}
QWEN3 = ("eagle3-qwen3",)
"""Heads whose layers are those of Qwen3; those of the others are Llama's."""


class Absent(MetaPathFinder, Loader):
    """Imports packages that are not installed and not used as empty ones."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        root = name.partition(".")[0]
        return ModuleSpec(name, self, is_package=True) if root in UNUSED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock()  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


PEAGLE = {
    "peagle": {"norm_before_residual": True},
    "peagle-post-norm": {"norm_before_fc": True, "norm_output": True},
}


def main() -> None:
    sys.meta_path.append(Absent())  # packages that are installed come first
    for name, options in (EAGLE3 | PEAGLE).items():
        (write_peagle if name in PEAGLE else write_eagle3)(FOLDER / name, options)
        size = sum(file.stat().st_size for file in (FOLDER / name).iterdir())
        print(f"{name}: {size} bytes")


def write_eagle3(folder: Path, options: dict[str, bool]) -> None:
    """A checkpoint of the package's EAGLE-3 model, and its logits at every step of the
    training-time test."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    config = configured(Eagle3SpeculatorConfig, folder, options)
    model, ids_D, generator = randomised(Eagle3DraftModel(config=config))
    tokens_T = torch.randint(VOCAB, (TOKENS,), generator=generator)
    hidden_TF = torch.randn(TOKENS - 1, WIDTH * len(LAYERS), generator=generator)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(
            hidden_TF[None],
            tokens_T[None, 1:],
            torch.zeros(1, TOKENS - 1, dtype=torch.int64),
            ttt_steps=STEPS,
        )
    tensors = {f"logits.{i}": logits_TD for i, logits_TD in enumerate(logits)}
    write(model, folder, tensors | {"tokens": tokens_T, "hidden": hidden_TF, "target_ids": ids_D})


def write_peagle(folder: Path, options: dict[str, bool]) -> None:
    """A checkpoint of the package's P-EAGLE model, and its logits at all depths behind all slots:
    of slot t at depth d, row t of ``logits.d``."""
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
    from speculators.models.peagle import core as package

    def all_anchors(seq_length: int, **_: object) -> tuple[Tensor, Tensor]:
        anchor_DT = [torch.arange(seq_length - d) for d in range(STEPS)]
        depth_DT = [torch.full((seq_length - d,), d) for d in range(STEPS)]
        return torch.cat(anchor_DT), torch.cat(depth_DT)

    package.generate_cod_sample_indices = all_anchors
    package.compute_metrics = lambda **_: (None, {})  # its losses need Triton
    config = configured(PEagleSpeculatorConfig, folder, options, mask_token_id=MASK)
    model, ids_D, generator = randomised(PEagleDraftModel(config=config))
    model.verifier_lm_head.weight.data.zero_()
    tokens_T = torch.randint(VOCAB, (TOKENS,), generator=generator)
    hidden_TF = torch.randn(TOKENS - 1, WIDTH * len(LAYERS), generator=generator)
    logits: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    with torch.no_grad():
        model(
            hidden_TF[None],
            tokens_T[None, 1:],
            torch.zeros(1, TOKENS - 1, dtype=torch.int64),
            verifier_last_hidden_states=torch.zeros(1, TOKENS - 1, WIDTH),
            num_depths=STEPS,
        )
    rows = logits[0].split([TOKENS - 1 - d for d in range(STEPS)])
    tensors = {f"logits.{d}": logits_TD for d, logits_TD in enumerate(rows)}
    write(model, folder, tensors | {"tokens": tokens_T, "hidden": hidden_TF, "target_ids": ids_D})


def configured(kind: Any, folder: Path, options: dict[str, bool], **more: object) -> Any:
    """The package's configuration of a tiny head."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

    family = Qwen3Config if folder.name in QWEN3 else LlamaConfig
    layer = family(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        max_position_embeddings=64,
        rms_norm_eps=1e-5,
    )
    layer._attn_implementation = "eager"
    return kind(
        transformer_layer_config=layer,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=LAYERS,
        speculators_config=SpeculatorsConfig(
            algorithm=folder.name.partition("-")[0],
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="target", architectures=["LlamaForCausalLM"]),
        ),
        **options,
        **more,
    )


def randomised(model: Any) -> tuple[Any, Tensor, torch.Generator]:
    """The model with random weights and a random draft vocabulary, which is also returned."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.ndim > 1 else 1 + 0.3 * noise)
    ids_D = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    mask_V = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids_D, True)
    model.load_vocab_mappings(mask_V, ids_D - torch.arange(DRAFT_VOCAB))
    return model.eval(), ids_D, generator


def write(model: Any, folder: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a checkpoint, and beside it what was computed with it."""
    model.save_pretrained(folder)
    (folder / "config.py").unlink(missing_ok=True)  # a copy of the package's source
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder.with_name(f"{folder.name}-expected.safetensors"))


if __name__ == "__main__":
    main()
