"""Progress of a training run: a live bar on a terminal, plain lines in a pipe, TensorBoard.

Losses are in nats per token.  Tokens per second are measured since the last report.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def open_tensorboard(folder: Path, step: int) -> Any:
    """A TensorBoard writer that discards what an interrupted run logged from `step` on."""
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise ValueError(
            "logging to TensorBoard needs the package tensorboard; "
            "run `pip install outrider[train]` or pass --no-tensorboard"
        ) from None
    return SummaryWriter(str(folder), purge_step=step)


class Reporter:
    """Reports the steps of a run.  Use it as a context manager."""

    def __init__(
        self,
        title: str,
        first_step: int,
        steps: int,
        console: Console,
        log_every: int,
        tensorboard: Path | None,
    ) -> None:
        self.steps, self.console, self.log_every = steps, console, log_every
        self.writer = open_tensorboard(tensorboard, first_step) if tensorboard else None
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self.task = self.bar.add_task(title, total=steps, completed=first_step, note="")
        self.title, self.since, self.tokens, self.losses = title, time.perf_counter(), 0, [0.0]
        self.losses.clear()

    def __enter__(self) -> Reporter:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.bar.stop()
        if self.writer:
            self.writer.close()

    def step(self, step: int, loss: float, num_tokens: int, learning_rate: float) -> None:
        """Record a finished step; report every `log_every` steps and after the last."""
        self.losses.append(loss)
        self.tokens += num_tokens
        done = step + 1
        self.bar.update(self.task, completed=done)
        if done % self.log_every and done != self.steps:
            return
        seconds = time.perf_counter() - self.since
        mean, speed = sum(self.losses) / len(self.losses), self.tokens / seconds
        left = (self.steps - done) * seconds / len(self.losses)
        note = f"loss {mean:.4f}  {speed:,.0f} tok/s"
        self.bar.update(self.task, note=note)
        if not self.console.is_terminal:
            self.console.print(
                f"{self.title} step {done}/{self.steps}  {note}  lr {learning_rate:.2e}  "
                f"{left / 60:.1f} min left",
                soft_wrap=True,
                highlight=False,
            )
        self.scalars(done, loss=mean, tokens_per_second=speed, learning_rate=learning_rate)
        self.since, self.tokens = time.perf_counter(), 0
        self.losses.clear()

    def scalars(self, step: int, **values: float) -> None:
        """Write named curves to TensorBoard."""
        if self.writer:
            for name, value in values.items():
                self.writer.add_scalar(name, value, step)

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Report what was measured, by name.  The time it took does not count for the speed."""
        self.scalars(step, **{name.replace(" ", "_"): value for name, value in values.items()})
        shown = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        self.console.print(f"{self.title} step {step}  {shown}", highlight=False)
        self.since, self.tokens = time.perf_counter(), 0
        self.losses.clear()
