"""Checkpoints: one file with everything that a run needs to resume bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from outrider.train.disk import tensor_bytes, writing

CHECKPOINT = "checkpoint.pt"


class Stateful(Protocol):
    """What a checkpoint can hold beside model and optimisers: tensors and plain values."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def save_checkpoint(
    folder: Path,
    step: int,
    model: nn.Module,
    optimizers: list[Optimizer],
    identity: dict[str, Any],
    extra: Stateful | None = None,
) -> None:
    """Write `checkpoint.pt` atomically: a kill at any moment leaves the old file or the new one.

    Args:
        folder: made if it does not exist.
        step: the next step.
        model: its weights are saved.
        optimizers: their states are saved.
        identity: settings that a resumed run must share.
        extra: what else to save.

    Raises:
        DiskFullError: no room; the old file is intact.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "rng": torch.get_rng_state(),
        "identity": identity,
    }
    if extra is not None:
        state["extra"] = extra.state_dict()
    partial = folder / f"{CHECKPOINT}.partial"
    with (
        writing(partial, tensor_bytes(state), f"the checkpoint of step {step}", "free some"),
        open(partial, "wb") as file,
    ):
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, folder / CHECKPOINT)


def load_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizers: list[Optimizer],
    identity: dict[str, Any],
    extra: Stateful | None = None,
) -> int:
    """Restore a run and return its next step; 0 without a checkpoint.

    Mutates the model, the optimisers, `extra` and torch's random state.

    Raises:
        ValueError: the checkpoint belongs to a run with other settings, and the message names the
            setting; or the file is damaged.
    """
    path = folder / CHECKPOINT
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises errors of many kinds for files that are none of its
        raise ValueError(
            f"{path} is damaged, or no checkpoint of outrider; give another output folder, or "
            "--fresh to start over"
        ) from error
    for name, value in identity.items():
        if state["identity"].get(name) != value:
            raise ValueError(
                f"{folder} holds a run with {name} {state['identity'].get(name)!r}, not {value!r}; "
                "give that value, another output folder, or --fresh to start over"
            )
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    if extra is not None:
        extra.load_state_dict(state["extra"])
    torch.set_rng_state(state["rng"])
    return int(state["step"])
