"""Trains a small T5 and its draft model to turn a function's signature into its bare call.

    python -m recipes.seq2seq_pair --out DIR

    def pad(self, images: list[Image], size=None) -> tuple      →      pad(self, images, size)

All hyperparameters are in this file. The run takes about ten minutes on one core of a server (AMD
EPYC, AVX2) and 1.3 GB of memory; one thread (OMP_NUM_THREADS=1) is enough for models this small.
Stages whose result exists are skipped, and training resumes from its checkpoints, so the command
can be repeated after any interruption. The pairs come from the installed versions of PACKAGES. For
training, more pairs are recombined from their parts; a model cannot memorise those, only copy. One
text in forty, chosen by hash, is held out, so no held-out text is seen in training. Writes
DIR/target/model, DIR/draft/model and DIR/pairs; `python -m benchmarks.run_plan seq2seq` measures
the pair in runs/seq2seq on the held-out texts, pairs/held_out.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from outrider.lab.whole_file import write_whole
from outrider.train.corpus import collect
from outrider.train.export import export, load_weights
from outrider.train.loop import Interrupted, Settings, train
from outrider.train.models import num_parameters
from outrider.train.optim import Schedule, build_adamw
from outrider.train.pairs import PairBatches, Signature, encode_pairs, recombined, signatures
from outrider.train.seq2seq import T5Shape, build_t5, translation
from outrider.train.tokenizer import train_pair_tokenizer

SEED = 30
VOCAB_SIZE = 512
NUM_RECOMBINED = 80_000
SOURCE_WIDTH, TEXT_WIDTH = 32, 20
MAX_PACKAGE_BYTES = 2_000_000
PACKAGES = tuple(
    """python-stdlib click fsspec huggingface_hub matplotlib mypy networkx numpy pip pytest rich
    scipy setuptools sympy torch transformers typer""".split()
)
TARGET = T5Shape(VOCAB_SIZE, 128, 768, encoder_layers=2, decoder_layers=3, heads=8)
DRAFT = T5Shape(VOCAB_SIZE, 96, 384, encoder_layers=1, decoder_layers=1, heads=6)
BATCH = 48
TARGET_SCHEDULE = Schedule(learning_rate=2e-3, steps=900, warmup_steps=50, decay_steps=300)
DRAFT_SCHEDULE = Schedule(learning_rate=3e-3, steps=500, warmup_steps=50, decay_steps=200)


def build_pairs(folder: Path, console: Console) -> PreTrainedTokenizerFast:
    """Collect the pairs, train the tokenizer on the training split, and write both splits."""
    if not (folder / "manifest.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        sources = collect(PACKAGES, MAX_PACKAGE_BYTES)
        documents = [document for source in sources for document in source.documents]
        found = {signature for document in documents for signature in signatures(document.text)}
        changed = [s for s in found if s.pair[0] != f"def {s.pair[1]}"]
        real = sorted(changed, key=lambda signature: signature.pair)
        seen = [signature for signature in real if not _held_out(signature)]
        mixed = [s for s in recombined(seen, NUM_RECOMBINED, SEED) if not _held_out(s)]
        splits = {"train": [*seen, *mixed], "val": [s for s in real if _held_out(s)]}
        texts = [text for signature in seen for text in signature.pair if len(text) < 200]
        tokenizer = train_pair_tokenizer(texts, VOCAB_SIZE)
        tokenizer.save_pretrained(folder / "tokenizer")
        rows = {
            split: encode_pairs([s.pair for s in part], tokenizer, SOURCE_WIDTH, TEXT_WIDTH)
            for split, part in splits.items()
        }
        for split, array in rows.items():
            np.save(folder / f"{split}.npy", array)
        manifest = {
            "pairs": {split: len(array) for split, array in rows.items()},
            "sources": [[s.name, s.version, s.licence] for s in sources],
        }
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
        console.print(json.dumps(manifest["pairs"]))
    return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def write_held_out(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    """Writes the validation split as prompts with references."""
    rows = np.load(folder / "val.npy").astype(np.int64)
    parts = rows[:, :SOURCE_WIDTH], rows[:, SOURCE_WIDTH:]
    decoded = (tokenizer.batch_decode(part, skip_special_tokens=True) for part in parts)
    lines = [
        json.dumps({"prompt": source, "reference": text})
        for source, text in zip(*decoded, strict=True)
    ]
    write_whole(folder / "held_out.jsonl", "".join(f"{line}\n" for line in lines))


def _held_out(signature: Signature) -> bool:
    return int(hashlib.sha256(signature.pair[1].encode()).hexdigest()[:8], 16) % 40 == 0


def train_stage(
    title: str, model: T5ForConditionalGeneration, schedule: Schedule, out: Path
) -> None:
    """Train one model to the end of its schedule, from its checkpoint if there is one."""
    rows = {split: np.load(out / "pairs" / f"{split}.npy") for split in ("train", "val")}
    settings = Settings(
        schedule,
        checkpoint_every=100,
        validate_every=100,
        log_every=50,
        optimizers=build_adamw,
        identity={
            "learning rate": schedule.learning_rate,
            "seed": SEED,
            "parameters": num_parameters(model),
        },
    )
    held_out = torch.from_numpy(rows["val"].astype(np.int64))
    train(
        title,
        model,
        translation(model, SOURCE_WIDTH),
        PairBatches(rows["train"], BATCH, SEED),
        settings,
        out / title,
        held_out,
    )


def train_pair(out: Path, tokenizer: PreTrainedTokenizerFast, console: Console) -> None:
    """Train both models by cross-entropy on the pairs, and export them.

    The draft is not distilled from the target; `outrider train --pairs --teacher` would do that.
    """
    target, draft = build_t5(TARGET, SEED), build_t5(DRAFT, SEED + 1)
    train_stage("target", target, TARGET_SCHEDULE, out)
    train_stage("draft", draft, DRAFT_SCHEDULE, out)
    load_weights(target, out / "target")
    load_weights(draft, out / "draft")
    for title, model, schedule in (
        ("target", target, TARGET_SCHEDULE),
        ("draft", draft, DRAFT_SCHEDULE),
    ):
        card = (
            f"# {title}\n\nT5, {num_parameters(model):,} parameters; {schedule.steps} steps of "
            f"{BATCH} pairs (`python -m recipes.seq2seq_pair`).\n"
        )
        export(model, tokenizer, out / title / "model", card)
    console.print(f"the models are in {out}/target/model and {out}/draft/model", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small T5 and its draft.")
    parser.add_argument("--out", type=Path, required=True, help="folder of pairs and checkpoints")
    out, console = parser.parse_args().out, Console(stderr=True)
    try:
        tokenizer = build_pairs(out / "pairs", console)
        write_held_out(out / "pairs", tokenizer)
        train_pair(out, tokenizer, console)
    except Interrupted as stop:
        console.print(f"stopped after step {stop}; run the same command again to continue")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
