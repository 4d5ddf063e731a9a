"""The training loop, which resumes bit for bit after a kill at any moment (eager, float32).

An objective maps a batch to a loss, and batches map a step number to a batch: tokens, or whatever
else the objective takes.  Everything that changes from step to step is either in the checkpoint or
a pure function of the step.

Shapes: B rows, T tokens of a row (a batch carries T+1).
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer

from outrider.train.checkpoint import load_checkpoint, save_checkpoint
from outrider.train.losses import Objective
from outrider.train.optim import Schedule, build_optimizers, set_learning_rate
from outrider.train.progress import Reporter


@dataclass(frozen=True)
class Settings:
    """How to run. A run may be resumed with other settings, except those in `identity`."""

    schedule: Schedule
    until: int | None = None  # stop after this step, before the schedule's last
    dtype: torch.dtype = torch.float32  # bfloat16 runs under autocast; weights stay float32
    compile: bool = False
    clip: float = 1.0  # maximum norm of the gradient
    checkpoint_every: int = 200  # steps
    validate_every: int = 500  # steps
    log_every: int = 20  # steps
    tensorboard: bool = False
    optimizers: Callable[[nn.Module, float], list[Optimizer]] = build_optimizers
    identity: dict[str, Any] = field(default_factory=dict)  # a checkpoint must agree on these


Batch = TypeVar("Batch")
Part = TypeVar("Part")


class Interrupted(Exception):
    """Ctrl-C or SIGTERM stopped the run after a checkpoint; carries the number of steps done."""


def train(
    title: str,
    model: nn.Module,
    objective: Objective,
    batches: Callable[[int], Tensor],
    settings: Settings,
    folder: Path,
    validation_BT: Tensor | None = None,
    console: Console | None = None,
) -> None:
    """Train `model` in place to its last step, resuming from `folder`'s checkpoint if there is one.

    Args:
        title: of the run, for the user.
        model: the model.
        objective: the loss of a [B, T+1] batch; its parameters are `model`'s.
        batches: maps a step to its batch; must be a pure function.
        settings: how to run.
        folder: of the checkpoint and the logs.
        validation_BT: [B, T+1] held-out windows for the validation loss; None for no validation.
        console: for progress; standard error by default.

    Raises:
        Interrupted: after Ctrl-C; the checkpoint is saved.
        ValueError: the checkpoint belongs to another run, or the gradient is not finite.
    """

    def validate(step: int) -> Mapping[str, float]:
        assert validation_BT is not None
        with autocast(model, settings.dtype):
            return {"validation loss": validation_loss(objective, validation_BT)}

    train_in_parts(
        title,
        model,
        torch.compile(objective, dynamic=False) if settings.compile else objective,
        batches,
        settings,
        folder,
        split=lambda batch: (batch,),
        count=lambda batch: batch[:, 1:].numel(),
        measure=None if validation_BT is None else validate,
        console=console,
    )


def train_in_parts(
    title: str,
    model: nn.Module,
    objective: Callable[[Part], Tensor],
    batches: Callable[[int], Batch],
    settings: Settings,
    folder: Path,
    *,
    split: Callable[[Batch], Sequence[Part]],
    count: Callable[[Batch], int],
    measure: Callable[[int], Mapping[str, float]] | None = None,
    console: Console | None = None,
) -> None:
    """As :func:`train`, for batches of any type, whose gradient is computed part by part.

    Args:
        title, model, settings, folder, console: as of :func:`train`.
        objective: the loss of a part; the losses of a batch's parts add up.
        batches: maps a step to its batch; must be a pure function.
        split: the parts of a batch.
        count: tokens of a batch, for the speed that is reported.
        measure: maps the number of steps done to the curves that are reported, every
            `settings.validate_every` steps and after the last. It runs before the checkpoint of
            that step, so after a kill it may run again.

    Raises:
        Interrupted: after Ctrl-C; the checkpoint is saved.
        ValueError: the checkpoint belongs to another run, or loss or gradient are not finite.
    """
    console = console or Console(stderr=True)
    schedule = settings.schedule
    steps = schedule.steps if settings.until is None else settings.until
    optimizers = settings.optimizers(model, schedule.learning_rate)
    first = load_checkpoint(folder, model, optimizers, settings.identity)
    if first:
        console.print(f"{title}: resuming after step {first}", highlight=False)
    if first >= steps:
        return
    reporter = Reporter(
        title,
        first,
        steps,
        console,
        settings.log_every,
        folder / "tensorboard" if settings.tensorboard else None,
    )
    with reporter, _stop_requests() as stop:
        for step in range(first, steps):
            batch = batches(step)
            set_learning_rate(optimizers, schedule(step))
            loss = 0.0
            for part in split(batch):
                with autocast(model, settings.dtype):
                    part_loss = objective(part)
                part_loss.backward()
                loss += part_loss.item()
            norm = nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
            if not (math.isfinite(loss) and torch.isfinite(norm)):
                raise ValueError(
                    f"the gradient is not finite at step {step} (loss {loss:g}); lower the "
                    f"learning rate (now {schedule.learning_rate}) and resume from the last "
                    f"checkpoint"
                )
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done = step + 1
            reporter.step(step, loss, count(batch), schedule(step))
            if measure is not None and (done % settings.validate_every == 0 or done == steps):
                reporter.measured(done, measure(done))
            if stop.is_set() or done % settings.checkpoint_every == 0 or done == steps:
                save_checkpoint(folder, done, model, optimizers, settings.identity)
            if stop.is_set():
                raise Interrupted(done)


def autocast(model: nn.Module, dtype: torch.dtype) -> torch.autocast:
    """Computes in a dtype on the model's device; its weights stay as they are."""
    device = next(model.parameters()).device.type
    return torch.autocast(device, dtype, enabled=dtype != torch.float32)


@torch.no_grad()
def validation_loss(objective: Objective, tokens_BT: Tensor, rows: int = 8) -> float:
    """Mean loss over held-out windows, a few rows at a time; nats per token."""
    chunks = tokens_BT.split(rows)
    return sum(objective(chunk).item() * len(chunk) for chunk in chunks) / len(tokens_BT)


@contextmanager
def _stop_requests() -> Iterator[threading.Event]:
    """Turn SIGINT and SIGTERM into an event that the loop checks between steps."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, lambda *_: stop.set()) for number in signals]
    try:
        yield stop
    finally:
        for number, handler in zip(signals, previous, strict=True):
            signal.signal(number, handler)
