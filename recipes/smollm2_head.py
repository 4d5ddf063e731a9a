"""Trains the EAGLE-3 head for SmolLM2-135M-Instruct that comes with the package.

    make real
    python -m recipes.smollm2_head --out runs/smollm2/head

The target first writes the conversations to train on (``self_chat.py``); ``--data FILE`` takes
others, and ``--start FOLDER`` trains an earlier head on. Both steps go on where they were
interrupted. The best head, by acceptance on conversations that were kept apart, ends up in
OUT/eagle3/best.

On two cores the conversations take an hour, and 1,200 steps take another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from outrider.runtime.kernels.build import find_compiler
from outrider.train.heads.kinds import find_kind
from outrider.train.heads.run import HeadRun, run_head
from outrider.train.optim import Schedule
from recipes.self_chat import training_data, training_parser
from recipes.smollm2 import HUB_ID

LEARNING_RATE = 5e-3  # of Muon; of 0.002, 0.006 and 0.015, the middle one learned most in 50 steps
WARMUP = 30
FALLING = 5 / 6
"""The share of the steps over which the learning rate falls."""
OPTIONS = {"ttt_length": 3, "compile": find_compiler() is not None}


def train(
    target: str,
    data: Path,
    out: Path,
    steps: int,
    seed: int,
    console: Console,
    start: Path | None = None,
    learning_rate: float = LEARNING_RATE,
) -> Path:
    """Trains the head; returns the folder of the best one.

    Args:
        target: folder or hub id.
        data: conversations with the target's own answers.
        out: folder of the run.
        steps: of 8 conversations each.
        seed: of the initial weights and the order of the data.
        console: for progress.
        start: folder of a head to train on; None starts from random weights.
        learning_rate: the highest.
    """
    options = OPTIONS | ({} if start is None else {"start": str(start)})
    run = HeadRun(find_kind("eagle3"), target, data, options, dtype="bfloat16", target_name=HUB_ID)
    return run_head(
        out,
        run,
        Schedule(learning_rate, steps, WARMUP, round(FALLING * steps), "cosine"),
        batch_size=8,
        seed=seed,
        dtype=torch.bfloat16,
        optimizer="muon",
        checkpoint_every=50,
        evaluate_every=300,
        console=console,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = training_parser("Train the head for SmolLM2-135M-Instruct.", steps=1200)
    parser.add_argument("--start", type=Path, help="folder of a head to train on")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], help="plain text to summarise")
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE, help="the highest")
    given = parser.parse_args(arguments)
    console = Console(stderr=True)
    data = training_data(given, console)
    out = given.out / "eagle3"
    train(
        given.target,
        data,
        out,
        given.steps,
        given.seed,
        console,
        given.start,
        given.learning_rate,
    )


if __name__ == "__main__":
    main()
