"""A whole run of `outrider train-head`: samples, hidden states, training, the best checkpoint.

out/states/      hidden states of the samples (``states.py``), unless kept elsewhere
out/checkpoint.pt  what it takes to resume bit for bit
out/last/        the head after the last evaluation
out/best/        the head whose measured acceptance is highest, with measured.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress

from outrider.runtime import HFModel, load_model
from outrider.train.checkpoint import CHECKPOINT
from outrider.train.disk import tensor_bytes, writing
from outrider.train.heads.acceptance import Acceptance, Probe, curves, measure, score
from outrider.train.heads.batches import StateBatch, StateBatches
from outrider.train.heads.kind import Ground, HeadKind, Training
from outrider.train.heads.samples import Sample, held_out, prompts_of, read_samples
from outrider.train.heads.states import States, compute_states
from outrider.train.loop import Settings, train_in_parts
from outrider.train.optim import OPTIMIZERS, OptimizerName, Schedule

MEASURED = "measured.json"


@dataclass(frozen=True)
class HeadRun:
    """What to train, and on what.

    Attributes:
        kind: the kind of head.
        target: folder, hub id or model.
        data: file of samples (``samples.py``).
        options: of the kind, by name.
        length: most tokens of a sample.
        num_held_out: samples that are kept for measuring acceptance.
        eval_tokens: tokens of each continuation there.
        temperatures: of these continuations.
        cache: folder of hidden states; None keeps them with the run.
        dtype: of the target; None takes bfloat16 where the hardware computes in it.
        device: of target and head.
        target_name: what the checkpoint calls the target; None takes ``target``.
    """

    kind: HeadKind
    target: str | Path | HFModel
    data: Path
    options: Mapping[str, object] = field(default_factory=dict)
    length: int = 1024
    num_held_out: int = 16
    eval_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    cache: Path | None = None
    dtype: str | None = None
    device: str = "auto"
    target_name: str | None = None


def run_head(
    out: Path,
    run: HeadRun,
    schedule: Schedule,
    *,
    batch_size: int,
    seed: int,
    fresh: bool = False,
    dtype: torch.dtype = torch.float32,
    optimizer: OptimizerName = "adamw",
    checkpoint_every: int = 100,
    evaluate_every: int = 500,
    tensorboard: bool = False,
    console: Console | None = None,
) -> Path:
    """Trains a head in ``out``; resumes an earlier run unless ``fresh``. Returns the best head's
    folder.

    Raises:
        OutriderError: a target that cannot be loaded, or an option outside its domain.
        ValueError: unusable data, a checkpoint of another run, or a loss that is not finite.
        DiskFullError: too little room for the hidden states.
        Interrupted: after Ctrl-C; the checkpoint is saved.
    """
    console = console or Console(stderr=True)
    values = run.kind.values(run.options)
    if fresh:
        (out / CHECKPOINT).unlink(missing_ok=True)
        for name in ("best", "last"):
            shutil.rmtree(out / name, ignore_errors=True)
    target = load_model(run.target, dtype=run.dtype, device=run.device, role="target")
    target.module.requires_grad_(False)
    samples = _samples(run, target)
    kept, probes = held_out(samples, run.num_held_out)
    states = _states(run, target, kept, out, values, console)
    counts_V = states.token_counts(target.num_tokens)
    ground = Ground(target, counts_V, seed, run.target_name)
    training = run.kind.build(ground, **values)
    training.module.to(target.device)
    probe = Probe(prompts_of(probes), run.temperatures, run.eval_tokens)
    training.module.train()
    train_in_parts(
        out.name,
        training.module,
        training.loss,
        StateBatches(states, batch_size, seed, target.device),
        Settings(
            schedule,
            dtype=dtype,
            clip=0.5,
            checkpoint_every=checkpoint_every,
            validate_every=evaluate_every,
            tensorboard=tensorboard,
            optimizers=OPTIMIZERS[optimizer],
            identity={
                "kind": run.kind.name,
                "options": {name: str(value) for name, value in values.items()},
                "hidden states": states.folder.name,
                "learning rate": schedule.learning_rate,
                "optimizer": optimizer,
                "batch": batch_size,
                "seed": seed,
            },
        ),
        out,
        split=lambda batch: (batch,),
        count=_num_tokens,
        measure=lambda step: _evaluated(training, target, run.kind.method, probe, out, step),
        console=console,
    )
    best = out / "best"
    if run.kind.finish is not None:
        run.kind.finish(best, ground, _states(run, target, probes, out, values, console))
    console.print(f"the best head is in {best}: {_shown(best)}", highlight=False)
    return best


def _num_tokens(batch: StateBatch) -> int:
    return batch.num_tokens


def _samples(run: HeadRun, target: HFModel) -> list[Sample]:
    if target.tokenizer is None:
        raise ValueError(f"{target.name} has no tokenizer, which the samples need")
    return read_samples(run.data, target.tokenizer, min(run.length, target.limit))


def _states(
    run: HeadRun,
    target: HFModel,
    samples: list[Sample],
    out: Path,
    values: dict[str, Any],
    console: Console,
) -> States:
    """The hidden states of the samples, which a progress bar accompanies."""
    layers = run.kind.layers(target, values)
    with Progress(console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("hidden states", total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        return compute_states(target, samples, layers, run.cache or out / "states", report)


def _evaluated(
    training: Training, target: HFModel, method: str, probe: Probe, out: Path, step: int
) -> dict[str, float]:
    """Measures the head, keeps it in ``last``, and in ``best`` if no earlier one is better."""
    training.module.eval()
    found = measure(training.head(), target, method, probe)
    training.module.train()
    _keep(training, found, out / "last", step)
    before = _read_measured(out / "best")
    if before is None or score(found) > before["score"] or before["step"] == step:
        _keep(training, found, out / "best", step)
    return curves(found)


def _keep(training: Training, found: Mapping[float, Acceptance], folder: Path, step: int) -> None:
    """Writes the head with its measurements; an earlier one is replaced once the new one is whole.

    Raises:
        DiskFullError: no room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = tensor_bytes(training.module.state_dict()) // 2  # trained in float32, saved in bfloat16
    with writing(folder / "model.partial", size, f"the head of step {step}", "free some"):
        training.save(folder)
    _write_measured(folder, found, step)


def _write_measured(folder: Path, found: Mapping[float, Acceptance], step: int) -> None:
    values = {f"{temperature:g}": asdict(each) for temperature, each in found.items()}
    document = {"step": step, "score": score(found), "by_temperature": values}
    partial = folder / "measured.partial"
    partial.write_text(json.dumps(document, indent=1) + "\n")
    partial.replace(folder / MEASURED)


def _read_measured(folder: Path) -> dict[str, Any] | None:
    file = folder / MEASURED
    if not file.exists():
        return None
    document: dict[str, Any] = json.loads(file.read_text())
    return document


def _shown(folder: Path) -> str:
    document = _read_measured(folder)
    assert document is not None
    lengths = (
        f"{each['length']:.2f} at temperature {temperature}"
        for temperature, each in document["by_temperature"].items()
    )
    return f"acceptance length {', '.join(lengths)}, after step {document['step']}"
