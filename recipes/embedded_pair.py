"""Trains and exports the embedded pair, from source text to shipped weights.

    python -m recipes.embedded_pair --out DIR

All hyperparameters are in this file.  Each stage is skipped when its result exists, and training
resumes from its checkpoints, so the command can be repeated after any interruption.

The corpus consists of the installed versions of PACKAGES, which the model card records.  A missing
package raises an error that names it and the command that installs it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
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
TARGET_SCHEDULE = Schedule(learning_rate=4e-3, steps=1250, warmup_steps=60, decay_steps=340)
DRAFT_SCHEDULE = Schedule(learning_rate=4e-3, steps=1600, warmup_steps=20, decay_steps=600)
POLISH_SCHEDULE = Schedule(learning_rate=1e-3, steps=250, warmup_steps=10, decay_steps=200)
STEP_TOKENS = {"target": 6144, "draft": 3072, "polish": 3072}
ROW_TOKENS = 256  # short rows train fastest
LONG_ROW_TOKENS, LONG_STEPS = 1024, 50  # the last steps, in which the model learns its full context
POLISH_ROW_TOKENS = 512
EVALUATION_ROWS = 64
Stage = tuple[int, str, int]  # tokens of a row, attention implementation, last step
SUMMARIES = {
    "target": "A small, deep language model of Python source: the target of the pair that ships "
    "with Outrider, so that speculative decoding can be tried without downloading anything.",
    "draft": "The draft model of the pair that ships with Outrider: one layer, distilled from the "
    "embedded target.",
}
ROWS = {
    "target": f"{ROW_TOKENS} tokens, {LONG_ROW_TOKENS} in the last {LONG_STEPS} steps; "
    f"predictions are worse well beyond {ROW_TOKENS} tokens",
    "draft": f"{ROW_TOKENS} tokens, {LONG_ROW_TOKENS} in the last {LONG_STEPS} steps of forward "
    f"KL, {POLISH_ROW_TOKENS} in the {POLISH_SCHEDULE.steps} steps of total variation",
}
OBJECTIVES = {
    "target": "cross-entropy",
    "draft": "forward KL to the target on the corpus, then total variation",
}


def build_corpus(folder: Path, console: Console) -> PreTrainedTokenizerFast:
    """Collect the corpus, train the tokenizer on its training split, and write the tokens."""
    if (folder / "manifest.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    sources = collect(PACKAGES, MAX_PACKAGE_BYTES)
    texts = [d.text for source in sources for d in source.documents if not d.held_out]
    tokenizer = train_tokenizer(texts, VOCAB_SIZE)
    tokenizer.save_pretrained(folder / "tokenizer")
    manifest = write_tokens(sources, tokenizer, folder)
    console.print(json.dumps(manifest["splits"]))
    return tokenizer


def train_in_stages(
    title: str,
    model: LlamaForCausalLM,
    objective: Objective,
    schedule: Schedule,
    out: Path,
    stages: Iterable[Stage],
) -> None:
    """Run the stages one after the other, each from the checkpoint of the previous one."""
    tokens, held_out = (open_tokens(out / "corpus" / f"{split}.bin") for split in ("train", "val"))
    for row_tokens, attention, until in stages:
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
        train(
            title,
            model,
            objective,
            Batches(tokens, STEP_TOKENS[title] // row_tokens, row_tokens, SEED + row_tokens),
            settings,
            out / title,
            validation_rows(held_out, ROW_TOKENS, max_rows=64),
        )


def short_then_long(schedule: Schedule) -> tuple[Stage, Stage]:
    """Short rows, then long ones, each with the faster attention implementation."""
    return (
        (ROW_TOKENS, "eager", schedule.steps - LONG_STEPS),
        (LONG_ROW_TOKENS, "sdpa", schedule.steps),
    )


def train_target(out: Path) -> None:
    """Train the target: cross-entropy on the corpus."""
    model, schedule = build_llama(TARGET, SEED), TARGET_SCHEDULE
    objective = language_modelling(model)
    train_in_stages("target", model, objective, schedule, out, short_then_long(schedule))


def train_draft(out: Path) -> None:
    """Train the draft: forward KL to the target, starting from the target's embeddings."""
    target = build_llama(TARGET, SEED)
    load_weights(target, out / "target")
    draft, schedule = build_llama(DRAFT, SEED + 1), DRAFT_SCHEDULE
    copy_embeddings(target, draft)
    objective = distillation(draft, in_bfloat16(target))
    train_in_stages("draft", draft, objective, schedule, out, short_then_long(schedule))


def polish_draft(out: Path) -> None:
    """Continue training the draft on total variation, which is exactly 1 - α."""
    target, draft = build_llama(TARGET, SEED), build_llama(DRAFT, SEED + 1)
    load_weights(target, out / "target")
    load_weights(draft, out / "draft")
    objective = distillation(draft, in_bfloat16(target), total_variation)
    stage = (POLISH_ROW_TOKENS, "sdpa", POLISH_SCHEDULE.steps)
    train_in_stages("polish", draft, objective, POLISH_SCHEDULE, out, [stage])


def export_pair(out: Path, assets: Path, console: Console) -> None:
    """Measure the pair in bf16, the precision it ships in, and write both folders with cards."""
    manifest = json.loads((out / "corpus" / "manifest.json").read_text())
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "corpus" / "tokenizer")
    held_out = open_tokens(out / "corpus" / "val.bin")
    target, draft = build_llama(TARGET, SEED), build_llama(DRAFT, SEED + 1)
    steps = {"target": load_weights(target, out / "target")}
    steps["draft"] = load_weights(draft, out / "polish") + DRAFT_SCHEDULE.steps
    in_bfloat16(target).eval()
    in_bfloat16(draft).eval()
    report = evaluate_pair(target, draft, validation_rows(held_out, 256, EVALUATION_ROWS))
    console.print(pair_table(report), markup=False)
    for name, model in (("target", target), ("draft", draft)):
        with torch.inference_mode():
            rows = validation_rows(held_out, 512, EVALUATION_ROWS)
            loss = validation_loss(language_modelling(model), rows)
        val = manifest["splits"]["val"]
        bits = bits_per_byte(loss, val["tokens"], val["bytes"])
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
            "training": f"{steps[name]:,} steps of {STEP_TOKENS[name]:,} tokens "
            f"({steps[name] * STEP_TOKENS[name] / 1e6:.1f} million), Muon and AdamW, bf16 autocast",
            "rows": ROWS[name],
            "validation loss": f"{loss:.3f} nats per token, "
            f"**{bits:.3f} bits per byte**, on held-out files",
            "hardware": hardware(),
        }
        card = model_card(
            f"Outrider's embedded {name}",
            SUMMARIES[name],
            facts,
            report,
            manifest,
            "python -m recipes.embedded_pair --out runs/embedded_pair --assets outrider/assets",
        )
        export(model, tokenizer, assets / name, card)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and export the embedded pair.")
    parser.add_argument("--out", type=Path, required=True, help="folder of corpus and checkpoints")
    parser.add_argument("--assets", type=Path, help="folder to export to (default: OUT/assets)")
    arguments = parser.parse_args()
    out, console = arguments.out, Console(stderr=True)
    build_corpus(out / "corpus", console)
    try:
        train_target(out)
        train_draft(out)
        polish_draft(out)
    except Interrupted as stop:
        console.print(f"stopped after step {stop}; run the same command again to continue")
        raise SystemExit(130) from None
    export_pair(out, arguments.assets or out / "assets", console)


if __name__ == "__main__":
    main()
