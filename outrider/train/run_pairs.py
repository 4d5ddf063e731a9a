"""A whole run of `outrider train --pairs`: trains a T5, or a draft model for one.

Pairs are JSON lines, ``{"source": ..., "text": ...}``. All pairs of one text in forty, chosen by
hash, are held out, so no held-out text is seen in training.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

from outrider.train.checkpoint import CHECKPOINT
from outrider.train.corpus import read_utf8
from outrider.train.export import export
from outrider.train.loop import Settings, train
from outrider.train.models import num_parameters
from outrider.train.optim import Schedule, build_adamw
from outrider.train.pairs import END, PAD, Pair, PairBatches, encode_pairs
from outrider.train.seq2seq import T5Shape, build_t5, translation, translation_distillation
from outrider.train.tokenizer import train_pair_tokenizer


@dataclass(frozen=True)
class PairRun:
    """What to train on and what to start from.

    Attributes:
        pairs: the file of pairs.
        shape: of the T5; the size of its vocabulary is the tokenizer's.
        teacher: folder of a trained target; the new model becomes its draft model.
        length: most tokens of a source, and of a text; longer pairs are left out.
    """

    pairs: Path
    shape: T5Shape
    teacher: Path | None = None
    length: int = 64


def run_pairs(
    out: Path,
    what: PairRun,
    schedule: Schedule,
    *,
    batch_size: int,
    seed: int,
    fresh: bool,
    dtype: str,
    checkpoint_every: int,
    tensorboard: bool,
) -> None:
    """Train in `out` and leave the model in `out/model`; resume an earlier run unless `fresh`."""
    console = Console(stderr=True)
    if fresh:
        (out / CHECKPOINT).unlink(missing_ok=True)
    splits = split_pairs(read_pairs(what.pairs))
    teacher = _teacher(what.teacher)
    if what.teacher is not None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(what.teacher)
    else:
        texts = [text for pair in splits["train"] for text in pair]
        tokenizer = train_pair_tokenizer(texts, what.shape.vocab_size)
    model = build_t5(replace(what.shape, vocab_size=len(tokenizer)), seed)
    width = what.length
    rows = {s: encode_pairs(pairs, tokenizer, width, width) for s, pairs in splits.items()}
    held_out: Tensor | None = torch.from_numpy(rows["val"].astype(np.int64))
    if held_out is not None and not len(held_out):
        console.print("no held-out pairs for a validation loss; continuing without it")
        held_out = None
    plain = translation(model, width)
    train(
        out.name,
        model,
        translation_distillation(model, teacher, width) if teacher else plain,
        PairBatches(rows["train"], batch_size, seed),
        Settings(
            schedule,
            dtype=getattr(torch, dtype),
            checkpoint_every=checkpoint_every,
            tensorboard=tensorboard,
            optimizers=build_adamw,
            identity={
                "learning rate": schedule.learning_rate,
                "batch": batch_size,
                "length": width,
                "seed": seed,
                "parameters": num_parameters(model),
            },
        ),
        out,
        held_out,
        console,
    )
    card = (
        f"# {out.name}\n\nT5, {num_parameters(model):,} parameters; {schedule.steps} steps of "
        f"{batch_size} pairs.\n"
    )
    export(model, tokenizer, out / "model", card)
    console.print(f"the model is in {out / 'model'}", highlight=False)


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a file, in its order.

    Raises:
        ValueError: a line is not a pair, or the file is empty or no UTF-8 text.
    """
    pairs = []
    for number, line in enumerate(read_utf8(path).splitlines(), 1):
        try:
            entry = json.loads(line)
            pairs.append((str(entry["source"]), str(entry["text"])))
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{path}, line {number}: not a pair; each line must be "
                f'{{"source": "...", "text": "..."}}'
            ) from None
    if not pairs:
        raise ValueError(f"{path} holds no pairs; write one JSON object per line")
    return pairs


def split_pairs(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Splits pairs into ``train`` and ``val`` by the hash of their text."""
    splits: dict[str, list[Pair]] = {"train": [], "val": []}
    for pair in pairs:
        digest = hashlib.sha256(pair[1].encode()).hexdigest()
        splits["val" if int(digest[:8], 16) % 40 == 0 else "train"].append(pair)
    return splits


def _teacher(folder: Path | None) -> T5ForConditionalGeneration | None:
    if folder is None:
        return None
    model = T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    begins, ends = model.config.pad_token_id, model.config.eos_token_id
    if (begins, ends) != (PAD, END):
        raise ValueError(
            f"the teacher in {folder} begins texts with token {begins} and ends them with {ends}, "
            f"not {PAD} and {END}; take one that `outrider train --pairs` has trained"
        )
    return model
