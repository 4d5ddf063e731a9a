"""Trains and exports the embedded pair, from source text to shipped weights.

    python -m recipes.embedded_pair --out DIR [--start PAIR]

The shipped pair was trained twice: from nothing, and then on from the result, with other text of
the same corpus (``--start FIRST/assets``).  All hyperparameters are in this file.  Each stage is
skipped when its result exists, and training resumes from its checkpoints, so the command can be
repeated after any interruption.

The corpus consists of the installed versions of PACKAGES, which the model card records.  A missing
package raises an error that names it and the command that installs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.train.card import hardware, model_card, pair_table
from outrider.train.corpus import collect
from outrider.train.data import Batches, open_tokens, validation_rows, write_tokens
from outrider.train.distill.objective import distillation
from outrider.train.distill.start import copy_embeddings
from outrider.train.evaluate import bits_per_byte, evaluate_pair
from outrider.train.export import export, in_bfloat16, load_weights
from outrider.train.loop import Interrupted, Settings, train, validation_loss
from outrider.train.losses import Objective, language_modelling, total_variation
from outrider.train.models import Architecture, build_llama, num_parameters
from outrider.train.optim import Schedule
from outrider.train.tokenizer import train_tokenizer

SEED = 20
VOCAB_SIZE = 6144
MAX_PACKAGE_BYTES = 4_000_000
PACKAGES = tuple(
    """python-stdlib
    absl-py aiohttp anyio attrs black celery click dask django fastapi filelock flask fonttools
    fsspec httpcore httpx huggingface_hub jinja2 markdown markdown-it-py matplotlib mpmath mypy
    networkx nltk numpy packaging pandas pip pydantic pyparsing pytest python-dateutil PyYAML
    requests rich scikit-learn scipy setuptools sortedcontainers sphinx sqlalchemy starlette sympy
    tensorboard torch tornado transformers trio twisted typer urllib3 werkzeug xarray""".split()
)
TARGET = Architecture(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=640,
    num_hidden_layers=16,
    num_attention_heads=4,
    num_key_value_heads=2,
)
DRAFT = Architecture(
    vocab_size=VOCAB_SIZE,
    hidden_size=256,
    intermediate_size=896,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
)
STEP_TOKENS = {"target": 6144, "draft": 3072, "polish": 3072}
ROW_TOKENS = 256  # short rows train fastest
LONG_ROW_TOKENS = 1024  # in the last steps, in which the model learns its full context
POLISH_ROW_TOKENS = 512


@dataclass(frozen=True)
class Training:
    """One training of the pair.

    Attributes:
        target: the schedule of the target.
        draft: of the draft, by forward KL.
        polish: of the draft, by total variation.
        long_steps: the last steps of target and draft, with long rows.
        seen: by stage, how many batches of short rows and of long rows earlier trainings took; this
            one begins so many further on.
    """

    target: Schedule
    draft: Schedule
    polish: Schedule
    long_steps: int
    seen: Mapping[str, tuple[int, int]]


FIRST = Training(
    target=Schedule(learning_rate=4e-3, steps=1250, warmup_steps=60, decay_steps=340),
    draft=Schedule(learning_rate=4e-3, steps=1600, warmup_steps=20, decay_steps=600),
    polish=Schedule(learning_rate=1e-3, steps=250, warmup_steps=10, decay_steps=200),
    long_steps=50,
    seen={"target": (0, 0), "draft": (0, 0), "polish": (0, 0)},
)
SECOND = Training(
    target=Schedule(learning_rate=3e-3, steps=2000, warmup_steps=40, decay_steps=1000),
    draft=Schedule(learning_rate=3e-3, steps=1800, warmup_steps=20, decay_steps=1200),
    polish=Schedule(learning_rate=1e-3, steps=250, warmup_steps=10, decay_steps=200),
    long_steps=60,
    seen={"target": (1200, 50), "draft": (1550, 50), "polish": (250, 0)},
)
EVALUATION_ROWS = 64
Stage = tuple[int, str, int]  # tokens of a row, attention implementation, last step
_SHAPES = {"target": (TARGET, SEED), "draft": (DRAFT, SEED + 1)}  # and the seed of the weights
SUMMARIES = {
    "target": "A small, deep language model of Python source: the target of the pair that ships "
    "with Outrider, so that speculative decoding can be tried without downloading anything.",
    "draft": "The draft model of the pair that ships with Outrider: one layer, distilled from the "
    "embedded target.",
}
ROWS = {
    "target": f"{ROW_TOKENS} tokens, {LONG_ROW_TOKENS} in the last steps; predictions are worse "
    f"well beyond {ROW_TOKENS} tokens",
    "draft": f"{ROW_TOKENS} tokens, {LONG_ROW_TOKENS} in the last steps of forward KL, "
    f"{POLISH_ROW_TOKENS} in those of total variation",
}
OBJECTIVES = {
    "target": "cross-entropy",
    "draft": "forward KL to the target on the corpus, then total variation",
}


def build_corpus(folder: Path, start: Path | None, console: Console) -> PreTrainedTokenizerFast:
    """Collects the corpus, trains the tokenizer on its training split or takes that of a pair, and
    writes the tokens."""
    if (folder / "manifest.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    sources = collect(PACKAGES, MAX_PACKAGE_BYTES)
    if start is None:
        texts = [d.text for source in sources for d in source.documents if not d.held_out]
        tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    else:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(start / "target")
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = write_tokens(sources, tokenizer, folder)
    console.print(json.dumps(manifest["splits"]))
    return tokenizer


@dataclass(frozen=True)
class Recipe:
    """The stages of a training of the pair.

    Attributes:
        out: folder of corpus and checkpoints.
        start: the folder of the pair that is trained on; None begins from nothing.
    """

    out: Path
    start: Path | None

    @property
    def training(self) -> Training:
        """Which of the trainings it is."""
        return FIRST if self.start is None else SECOND

    @property
    def command(self) -> str:
        """The commands that reproduce the pair, a line each."""
        first = "python -m recipes.embedded_pair --out runs/first"
        second = "python -m recipes.embedded_pair --out runs/second --start runs/first/assets"
        return first if self.start is None else f"{first}\n{second}"

    def train_target(self) -> None:
        """Trains the target: cross-entropy on the corpus."""
        model = self._begun("target")
        stages = self._short_then_long(self.training.target)
        self._train("target", model, language_modelling(model), self.training.target, stages)

    def train_draft(self) -> None:
        """Trains the draft: forward KL to the target."""
        target, draft = self._trained("target"), self._begun("draft")
        if self.start is None:
            copy_embeddings(target, draft)
        objective = distillation(draft, in_bfloat16(target))
        stages = self._short_then_long(self.training.draft)
        self._train("draft", draft, objective, self.training.draft, stages)

    def polish_draft(self) -> None:
        """Trains the draft on by total variation, which is exactly 1 - α."""
        target, draft = self._trained("target"), self._trained("draft")
        objective = distillation(draft, in_bfloat16(target), total_variation)
        stages = [(POLISH_ROW_TOKENS, "sdpa", self.training.polish.steps)]
        self._train("polish", draft, objective, self.training.polish, stages)

    def _begun(self, name: str) -> LlamaForCausalLM:
        """A model before its training."""
        if self.start is not None:
            return LlamaForCausalLM.from_pretrained(self.start / name, dtype=torch.float32)
        return build_llama(*_SHAPES[name])

    def _trained(self, name: str) -> LlamaForCausalLM:
        """A model after a stage."""
        model = build_llama(*_SHAPES[name])
        load_weights(model, self.out / name)
        return model

    def _short_then_long(self, schedule: Schedule) -> tuple[Stage, Stage]:
        """Short rows, then long ones, each with the faster attention implementation."""
        return (
            (ROW_TOKENS, "eager", schedule.steps - self.training.long_steps),
            (LONG_ROW_TOKENS, "sdpa", schedule.steps),
        )

    def _train(
        self,
        title: str,
        model: LlamaForCausalLM,
        objective: Objective,
        schedule: Schedule,
        stages: Iterable[Stage],
    ) -> None:
        """Runs the stages one after the other, each from the checkpoint of the previous one."""
        corpus = self.out / "corpus"
        tokens, held_out = (open_tokens(corpus / f"{split}.bin") for split in ("train", "val"))
        seen = self.training.seen[title]
        for (row_tokens, attention, until), first in zip(stages, seen, strict=False):
            model.set_attn_implementation(attention)
            settings = Settings(
                schedule,
                until=until,
                dtype=torch.bfloat16,
                compile=True,
                checkpoint_every=50,
                validate_every=200,
                tensorboard=True,
                identity={"learning rate": schedule.learning_rate, "seed": SEED},
            )
            batches = Batches(
                tokens, STEP_TOKENS[title] // row_tokens, row_tokens, SEED + row_tokens
            )
            train(
                title,
                model,
                objective,
                partial(_later, batches, first),
                settings,
                self.out / title,
                validation_rows(held_out, ROW_TOKENS, max_rows=64),
            )


def _later(batches: Batches, first: int, step: int) -> Tensor:
    """The batch of a step, of those from ``first`` on."""
    return batches(first + step)


def export_pair(recipe: Recipe, assets: Path, console: Console) -> None:
    """Measures the pair in bf16, the precision it ships in, and writes both folders with cards."""
    out = recipe.out
    manifest = json.loads((out / "corpus" / "manifest.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "corpus" / "tokenizer")
    held_out = open_tokens(out / "corpus" / "val.bin")
    target, draft = build_llama(TARGET, SEED), build_llama(DRAFT, SEED + 1)
    steps = {"target": load_weights(target, out / "target")}
    steps["draft"] = load_weights(draft, out / "polish") + recipe.training.draft.steps
    in_bfloat16(target).eval()
    in_bfloat16(draft).eval()
    report = evaluate_pair(target, draft, validation_rows(held_out, 256, EVALUATION_ROWS))
    console.print(pair_table(report), markup=False)
    for name, model in (("target", target), ("draft", draft)):
        loss, bits = _losses(model, held_out, manifest["splits"]["val"])
        console.print(
            f"{name}: {loss:.4f} nats per token, {bits:.4f} bits per byte", highlight=False
        )
        config = model.config
        facts = {
            "parameters": f"{num_parameters(model):,}",
            "architecture": f"Llama, layers: {config.num_hidden_layers}, hidden size "
            f"{config.hidden_size}, FFN {config.intermediate_size}, "
            f"{config.num_attention_heads} heads ({config.num_key_value_heads} key-value), "
            "tied embeddings",
            "vocabulary": f"{VOCAB_SIZE}, byte-level BPE",
            "context": f"{config.max_position_embeddings} tokens",
            "objective": OBJECTIVES[name],
            "training": f"{_amount(name, steps[name])}, Muon and AdamW, bf16 autocast",
            "rows": ROWS[name],
            "validation loss": f"{loss:.3f} nats per token, "
            f"**{bits:.3f} bits per byte**, on held-out files",
            "hardware": hardware(),
        }
        if recipe.start is not None:
            facts |= _before(recipe.start, name, held_out, manifest["splits"]["val"])
        card = model_card(
            f"Outrider's embedded {name}",
            SUMMARIES[name],
            facts,
            report,
            manifest,
            recipe.command,
        )
        export(model, tokenizer, assets / name, card)


def _losses(
    model: LlamaForCausalLM, held_out: np.ndarray, split: Mapping[str, int]
) -> tuple[float, float]:
    """Nats per token and bits per byte of a model on held-out text."""
    with torch.inference_mode():
        rows = validation_rows(held_out, 512, EVALUATION_ROWS)
        loss = validation_loss(language_modelling(model), rows)
    return loss, bits_per_byte(loss, split["tokens"], split["bytes"])


def _amount(name: str, steps: int) -> str:
    """How much a model was trained."""
    tokens = STEP_TOKENS[name]
    return f"{steps:,} steps of {tokens:,} tokens ({steps * tokens / 1e6:.1f} million)"


def _before(
    start: Path, name: str, held_out: np.ndarray, split: Mapping[str, int]
) -> dict[str, str]:
    """What the card says of the model before the second training."""
    first = FIRST.target.steps if name == "target" else FIRST.draft.steps + FIRST.polish.steps
    model = LlamaForCausalLM.from_pretrained(start / name, dtype=torch.bfloat16).eval()
    loss, bits = _losses(model, held_out, split)
    return {
        "before": f"the weights began as those of a first training of {_amount(name, first)}, with "
        f"{loss:.3f} nats per token and {bits:.3f} bits per byte on the same text"
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and export the embedded pair.")
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus and checkpoints")
    parser.add_argument("--assets", type=Path, help="folder to export to (default: OUT/assets)")
    parser.add_argument("--start", type=Path, help="folder of a pair to train on")
    arguments = parser.parse_args()
    recipe, console = Recipe(arguments.out, arguments.start), Console(stderr=True)
    build_corpus(recipe.out / "corpus", recipe.start, console)
    try:
        recipe.train_target()
        recipe.train_draft()
        recipe.polish_draft()
    except Interrupted as stop:
        console.print(f"stopped after step {stop}; run the same command again to continue")
        raise SystemExit(130) from None
    export_pair(recipe, arguments.assets or recipe.out / "assets", console)


if __name__ == "__main__":
    main()
