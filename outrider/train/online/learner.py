"""What the trainer does with messages: learns from samples, and publishes versions of the weights.

The same learner runs in a process of its own (``process.py``) and in a thread (``thread.py``).
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.core.errors import OutriderError
from outrider.train.online.files import load_weights, save_weights
from outrider.train.online.samples import AnySample
from outrider.train.online.settings import Settings
from outrider.train.online.subject import Blueprint
from outrider.train.online.trainer import Trainer

HOLD_OUT_EVERY = 8
"""One sample in so many is never trained on: new weights are compared with the old ones on it."""
MOST_HELD_OUT = 32


# ---------------------------------------------------------------------- messages to the learner


@dataclass(frozen=True)
class Flush:
    """Learn from all samples so far, then answer with :class:`Flushed`."""

    number: int


@dataclass(frozen=True)
class Restore:
    """Go on from the weights of this file."""

    path: Path


@dataclass(frozen=True)
class Stop:
    """Save a checkpoint and end."""


# -------------------------------------------------------------------- messages from the learner


@dataclass(frozen=True)
class Ready:
    """The learner runs, and has taken so many steps before."""

    step: int


@dataclass(frozen=True)
class Stepped:
    """A step was taken: its number and its loss in nats per position."""

    step: int
    loss: float


@dataclass(frozen=True)
class Published:
    """New weights.

    Attributes:
        number: of the version.
        step: after which they are.
        path: their file.
        gain: by how much Σ min(p, q) on held-out samples is above that of the weights published
            before; None without held-out samples.
    """

    number: int
    step: int
    path: Path
    gain: float | None


@dataclass(frozen=True)
class Flushed:
    """All samples before the flush of this number are learned."""

    number: int


@dataclass(frozen=True)
class Failed:
    """The learner ended by an error, and would fail again."""

    message: str


@dataclass(frozen=True)
class Crashed:
    """The learner ended without a word; sent by whoever ran it."""

    message: str


class Inbox(Protocol):
    """Where messages to the learner arrive (``Mailbox``)."""

    def get(self, wait: bool = True) -> Any: ...


@dataclass(frozen=True)
class Plan:
    """What a learner needs to begin; can be pickled.

    Attributes:
        blueprint: builds what is trained.
        weights: file of the weights to begin with.
        folder: of the checkpoint and the versions.
        settings: the user's settings.
    """

    blueprint: Blueprint
    weights: Path
    folder: Path
    settings: Settings

    def trainer(self) -> Trainer:
        """The trainer, resumed from the folder's checkpoint if there is one."""
        with torch.inference_mode(False):
            student = self.blueprint.build()
            trainer = Trainer(student, self.settings.divergence, self.settings.learning_rate)
            trainer.restore(load_weights(self.weights))
            trainer.resume(self.folder)
        return trainer


class Learner:
    """Learns from the samples of an inbox.

    A step is taken for every ``settings.new_per_step`` new samples; the rest of its batch is drawn
    from those of earlier steps.

    Args:
        plan: what to begin with.
        send: takes messages from the learner.
        pause: called before each step; returns when it may be taken.
    """

    def __init__(
        self,
        plan: Plan,
        send: Callable[[Any], None],
        pause: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings = settings = plan.settings
        self._folder = plan.folder
        self._send, self._pause = send, pause
        self._trainer = plan.trainer()
        self._number = newest_version(plan.folder)
        self._published = copy.deepcopy(self._trainer)
        self._published.restore(load_weights(plan.weights))
        self._published_step = self._trainer.step
        self._random = random.Random(self._trainer.step)
        self._num_samples = 0
        self._fresh: deque[AnySample] = deque(maxlen=settings.buffer_samples)
        self._replay: deque[AnySample] = deque(maxlen=settings.replay_samples)
        self._held_out: deque[AnySample] = deque(maxlen=MOST_HELD_OUT)

    def run(self, inbox: Inbox) -> None:
        """Handles messages until :class:`Stop` arrives; takes steps while there is none."""
        self._send(Ready(self._trainer.step))
        while not isinstance(message := inbox.get(wait=not self._can_step), Stop):
            if isinstance(message, AnySample):
                self._take(message)
            elif isinstance(message, Flush):
                self._flush(message)
            elif isinstance(message, Restore):
                self._restore(message)
            else:
                self._pause()
                self._learn()
        self._trainer.save(self._folder)

    @property
    def _can_step(self) -> bool:
        return len(self._fresh) >= self._settings.new_per_step

    def _take(self, sample: AnySample) -> None:
        self._num_samples += 1
        is_held_out = self._num_samples % HOLD_OUT_EVERY == HOLD_OUT_EVERY // 2
        (self._held_out if is_held_out else self._fresh).append(sample)

    def _learn(self) -> None:
        """Takes a step; publishes its weights if it is time."""
        num_new = min(self._settings.new_per_step, len(self._fresh))
        new = [self._fresh.popleft() for _ in range(num_new)]
        num_old = min(len(self._replay), self._settings.batch_size - self._settings.new_per_step)
        old = self._random.sample(list(self._replay), num_old)
        loss = self._trainer.update([*new, *old])
        self._replay.extend(new)
        self._send(Stepped(self._trainer.step, loss))
        if self._trainer.step - self._published_step >= self._settings.publish_every:
            self._publish()

    def _publish(self) -> None:
        """Saves the weights as a version, unless they are worse than the last on what was held
        out; saves a checkpoint either way."""
        self._published_step = self._trainer.step
        self._trainer.save(self._folder)
        gain = None
        if self._held_out:
            held_out = list(self._held_out)
            gain = self._trainer.alpha(held_out) - self._published.alpha(held_out)
            if gain < 0:
                return
        self._number += 1
        path = version_path(self._folder, self._number)
        weights = self._trainer.weights()
        save_weights(path, weights)
        self._published.restore(weights)
        self._send(Published(self._number, self._trainer.step, path, gain))

    def _flush(self, message: Flush) -> None:
        while self._fresh:
            self._learn()
        if self._trainer.step > self._published_step:
            self._publish()
        self._send(Flushed(message.number))

    def _restore(self, message: Restore) -> None:
        weights = load_weights(message.path)
        for trainer in (self._trainer, self._published):
            trainer.restore(weights)
        self._trainer.save(self._folder)


def learn(
    plan: Plan,
    send: Callable[[Any], None],
    inbox: Inbox,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Runs a learner. An error that would occur again is sent as :class:`Failed`."""
    try:
        Learner(plan, send, pause).run(inbox)
    except (OutriderError, ValueError) as error:
        send(Failed(str(error)))


def version_path(folder: Path, number: int) -> Path:
    """The file of a version's weights."""
    return folder / "versions" / f"{number:06d}.safetensors"


def newest_version(folder: Path) -> int:
    """The highest number of a version in a folder; -1 if there is none."""
    files = (folder / "versions").glob("[0-9]*.safetensors")
    return max((int(path.stem) for path in files), default=-1)
