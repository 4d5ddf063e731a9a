"""A whole run of ``outrider distill``: prompts, answers, the target's distributions, training,
measured acceptance, and the finished draft.

The folder of a run holds

    cache/              prompts, answers and distributions, unless --cache names another folder
    checkpoint.pt       what the run resumes from
    tensorboard/        curves
    measurements.json   acceptance on held-out prompts, by step
    best/               the draft with the highest measured α: an ordinary model folder
    last/               the draft of the last measurement
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from outrider import assets
from outrider.core.errors import ModelLoadError
from outrider.runtime import HFModel, load_model
from outrider.runtime.executors.prepare import prepare
from outrider.train.card import hardware
from outrider.train.checkpoint import CHECKPOINT
from outrider.train.distill import result
from outrider.train.distill.data import Preparation
from outrider.train.distill.measure import Measurement, Meter
from outrider.train.distill.objective import RowObjective, from_cells, from_labels, from_target
from outrider.train.distill.packing import Row
from outrider.train.distill.settings import CROSS_ENTROPY, EMBEDDED, Distillation
from outrider.train.distill.sources import StepRows
from outrider.train.loop import train_in_parts
from outrider.train.losses import DIVERGENCES, jensen_shannon
from outrider.train.models import num_parameters


def distil(
    run: Distillation, console: Console | None = None, command: str | None = None
) -> Measurement:
    """Runs a distillation, going on after an interruption, and returns the best measurement.

    Args:
        run: what to do.
        console: for progress; standard error by default.
        command: that the model card gives; that of this process by default.

    Raises:
        Interrupted: after Ctrl-C; the checkpoint is saved.
        OutriderError: a model, a prompt or a parameter is wrong; the message names the remedy.
        DiskFullError: answers or probabilities do not fit on the disk.
        ValueError: the folder holds another run, or the loss is not finite.
    """
    console = console or Console(stderr=True)
    run.out.mkdir(parents=True, exist_ok=True)
    for name in (result.BEST, result.LAST):
        result.recover(run.out / name)
    target = load_target(run.target, run.device, run.dtype)
    draft: Any = run.start.build(target, run.seed, console)
    draft = draft.to(target.device)
    prepare(target, run.compile)
    data = Preparation(run, target, draft, console)
    history = result.History(run.out)
    meter = Meter(
        target,
        data.held_out,
        run.measured_answers,
        num_speculative_tokens=run.measuring.num_speculative_tokens,
        batch_size=run.batch_size,
        folder=data.held_out_folder,
    )
    rows = data.rows()
    clock = Clock(rows)

    def measure(step: int) -> Mapping[str, float]:
        saved = result.as_saved(draft, data.tokenizer)
        measurement = meter(saved, step, rows.positions)
        text = result.card(
            f"Draft for {data.target_name}",
            _facts(run, draft, data, measurement, clock.seconds()),
            measurement,
            command or shlex.join(["outrider", *sys.argv[1:]]),
        )
        result.save(saved.module, data.tokenizer, run.out / result.LAST, text)
        if history.is_best(measurement):
            result.save(saved.module, data.tokenizer, run.out / result.BEST, text)
        history.add(measurement)
        return {
            f"{name} at T={each.temperature:g}": value
            for each in measurement.at
            for name, value in (
                ("alpha", each.alpha),
                ("acceptance length", each.acceptance_length),
            )
        }

    settings = replace(
        run.settings,
        identity={
            **run.identity,
            "target": data.target_fingerprint,
            "prompts": data.fingerprint,
            "parameters": num_parameters(draft),
        },
    )
    if not (run.out / CHECKPOINT).exists():
        shown = "  ".join(f"{name} {value:.4f}" for name, value in measure(0).items())
        console.print(f"before training: {shown}", soft_wrap=True, highlight=False)
    train_in_parts(
        run.out.name,
        draft,
        _objective(run, draft, target, data.width),
        rows,
        settings,
        run.out,
        split=lambda batch: [row.to(target.device) for row in batch],
        count=_positions,
        measure=measure,
        state=clock,
        console=console,
    )
    if not history.measurements:  # somebody removed the file of a finished run
        measure(settings.schedule.steps)
    best = history.best()
    console.print(
        f"the best draft is that of step {best.step}, in {run.out / result.BEST}", highlight=False
    )
    return best


def load_target(
    source: str | Path | HFModel, device: str = "auto", dtype: str | None = None
) -> HFModel:
    """The target by folder, hub id or file, or the embedded one by ``embedded``.

    Raises:
        ModelLoadError: no such model, or an encoder-decoder.
    """
    if source == EMBEDDED:
        source = assets.target_path()
    target = load_model(source, device=device, dtype=dtype, role="target")
    if target.decoder_prompt is not None:
        raise ModelLoadError(
            f"{target.name} is an encoder-decoder; distil a draft for it with outrider train "
            "--pairs FILE --teacher MODEL"
        )
    if target.tokenizer is None:
        raise ModelLoadError(f"{target.name} has no tokenizer, which the draft needs")
    target.module.requires_grad_(False)
    return target


class Clock:
    """Seconds of training over all sittings of a run, kept in its checkpoint with its rows."""

    def __init__(self, rows: StepRows) -> None:
        self.rows = rows
        self._before, self._since = 0.0, time.perf_counter()

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._since

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds(), "rows": self.rows.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before, self._since = state["seconds"], time.perf_counter()
        self.rows.load_state_dict(state["rows"])


def _objective(
    run: Distillation, draft: PreTrainedModel, target: HFModel, width: int
) -> Callable[[Row], Any]:
    """The loss of a row."""
    if run.divergence == CROSS_ENTROPY:
        return from_labels(draft)
    divergence = DIVERGENCES[run.divergence]
    if divergence is jensen_shannon:
        divergence = partial(jensen_shannon, beta=run.beta)
    objective: RowObjective
    if run.num_cached:
        objective = from_cells(draft, divergence, run.temperature, width, run.compiles_loss)
    else:
        objective = from_target(
            draft, target.module, divergence, run.temperature, width, run.compiles_loss
        )
    return objective


def _positions(batch: list[Row]) -> int:
    return sum(len(row.predicts_N) for row in batch)


def _facts(
    run: Distillation,
    draft: PreTrainedModel,
    data: Preparation,
    measurement: Measurement,
    seconds: float,
) -> dict[str, str]:
    """The rows of the model card's table."""
    config = draft.config.get_text_config()
    cached = run.num_cached
    loss = run.divergence + (f" (β {run.beta:g})" if run.divergence == "js" else "")
    return {
        "target": data.target_name,
        "architecture": f"{type(draft).__name__}, {config.num_hidden_layers} layers, hidden size "
        f"{config.hidden_size}, {num_parameters(draft):,} parameters",
        "loss": loss
        if run.divergence == CROSS_ENTROPY
        else f"{loss} at temperature "
        f"{run.temperature:g}"
        + (f", over the {cached} most probable tokens and the tail" if cached else ""),
        "data": data.description,
        "training": f"{measurement.step:,} of {run.settings.schedule.steps:,} steps of {run.rows} "
        f"rows of {run.length} tokens, {measurement.tokens:,} tokens of answers in all; peak "
        f"learning rate {run.settings.schedule.learning_rate:g}",
        "hours": f"{seconds / 3600:.2f}, without the target's answers and probabilities",
        "hardware": hardware(),
    }
