"""A whole run of `outrider train`: corpus, tokenizer, model, training, export."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.train.card import corpus_table
from outrider.train.checkpoint import CHECKPOINT
from outrider.train.corpus import Source, collect, collect_files
from outrider.train.data import Batches, open_tokens, validation_rows, write_tokens
from outrider.train.distill.objective import distillation
from outrider.train.distill.start import copy_embeddings
from outrider.train.evaluate import bits_per_byte
from outrider.train.export import export
from outrider.train.loop import Settings, train, validation_loss
from outrider.train.losses import language_modelling
from outrider.train.models import Architecture, build_llama, num_parameters
from outrider.train.optim import Schedule
from outrider.train.tokenizer import train_tokenizer


@dataclass(frozen=True)
class Corpus:
    """What to train on.

    Attributes:
        packages: installed distributions.
        paths: text files and folders.
        max_package_bytes: cap on the text of each package.
    """

    packages: tuple[str, ...] = ()
    paths: tuple[Path, ...] = ()
    max_package_bytes: int | None = None

    def read(self) -> list[Source]:
        sources = collect(self.packages, self.max_package_bytes)
        return [*sources, collect_files(self.paths)] if self.paths else sources


@dataclass(frozen=True)
class Start:
    """What to start from.

    Attributes:
        architecture: of a new model.
        tokenizer: folder of an existing one; None trains one.
        teacher: folder of the target to distil from.
        weights: folder of a model whose training to continue.
    """

    architecture: Architecture
    tokenizer: Path | None = None
    teacher: Path | None = None
    weights: Path | None = None


def run(
    out: Path,
    corpus: Corpus,
    start: Start,
    schedule: Schedule,
    *,
    batch_size: int,
    length: int,
    seed: int,
    fresh: bool,
    dtype: str,
    compile: bool,
    checkpoint_every: int,
    tensorboard: bool,
) -> None:
    """Train in `out` and leave the model in `out/model`; resume an earlier run unless `fresh`."""
    console = Console(stderr=True)
    if fresh:
        (out / CHECKPOINT).unlink(missing_ok=True)
        (out / "corpus" / "manifest.json").unlink(missing_ok=True)
    tokenizer = _prepare(out / "corpus", corpus, start)
    model, teacher = _models(start, len(tokenizer), seed)
    objective = distillation(model, teacher) if teacher else language_modelling(model)
    held_out = _held_out(out / "corpus" / "val.bin", length, console)
    train(
        out.name,
        model,
        objective,
        Batches(open_tokens(out / "corpus" / "train.bin"), batch_size, length, seed),
        Settings(
            schedule,
            dtype=getattr(torch, dtype),
            compile=compile,
            checkpoint_every=checkpoint_every,
            tensorboard=tensorboard,
            identity={
                "learning rate": schedule.learning_rate,
                "batch": batch_size,
                "length": length,
                "seed": seed,
                "parameters": num_parameters(model),
            },
        ),
        out,
        held_out,
        console,
    )
    manifest = json.loads((out / "corpus" / "manifest.json").read_text())
    quality = "not measured: too little held-out text"
    if held_out is not None:
        loss = validation_loss(language_modelling(model.eval()), held_out)
        val = manifest["splits"]["val"]
        quality = f"{bits_per_byte(loss, val['tokens'], val['bytes']):.3f} bits per byte"
    card = (
        f"# {out.name}\n\n{schedule.steps} steps of {batch_size * length} tokens; "
        f"on held-out text: {quality}.\n\n{corpus_table(manifest)}\n"
    )
    export(model, tokenizer, out / "model", card)
    console.print(f"held-out text: {quality}; the model is in {out / 'model'}", highlight=False)


def _held_out(path: Path, length: int, console: Console) -> Tensor | None:
    """[B, T+1] validation windows; None, with a message, if there is too little held-out text."""
    if path.stat().st_size <= 2 * length:
        console.print("too little held-out text for a validation loss; continuing without it")
        return None
    return validation_rows(open_tokens(path), length, max_rows=64)


def _prepare(folder: Path, corpus: Corpus, start: Start) -> PreTrainedTokenizerFast:
    """Write tokenizer and tokens into `folder` unless it has them, and return the tokenizer."""
    if (folder / "manifest.json").exists():
        return PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    sources = corpus.read()
    if existing := start.tokenizer or start.teacher or start.weights:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(existing)
    else:
        texts = [d.text for s in sources for d in s.documents if not d.held_out]
        tokenizer = train_tokenizer(texts, start.architecture.vocab_size)
    tokenizer.save_pretrained(folder / "tokenizer")
    write_tokens(sources, tokenizer, folder)
    return tokenizer


def _models(
    start: Start, vocab_size: int, seed: int
) -> tuple[LlamaForCausalLM, LlamaForCausalLM | None]:
    """The model to train and, for distillation, its frozen teacher."""
    if start.weights:
        model = LlamaForCausalLM.from_pretrained(start.weights, dtype=torch.float32)
    else:
        model = build_llama(replace(start.architecture, vocab_size=vocab_size), seed)
    teacher = None
    if start.teacher:
        teacher = LlamaForCausalLM.from_pretrained(start.teacher, dtype=torch.float32)
        if teacher.config.vocab_size != model.config.vocab_size:
            raise ValueError(
                f"the teacher's vocabulary has {teacher.config.vocab_size} entries, the "
                f"tokenizer's {model.config.vocab_size}; use the teacher's tokenizer"
            )
        if not start.weights:
            copy_embeddings(teacher, model)
    return model, teacher
