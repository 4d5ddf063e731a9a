"""Adapts an engine's draft model or head to what the engine generates (Liu et al.,
"Online Speculative Decoding", ICML 2024, https://arxiv.org/abs/2310.07177).

While the engine generates, the target's distributions at verified positions are collected. A
trainer takes steps on them, in a process of its own or while the engine is idle, and publishes new
weights, which are exchanged between two rounds. On trial they draft in alternation with the weights
before them, and are rolled back if measured acceptance is lower.

The distribution of the output does not change: a lossless rule corrects whatever distribution q the
tokens were drawn from, and q is recorded with each draft. Keys and values that older weights left
in the draft model's KV cache make the next drafts worse at most.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core import Round
from outrider.core.errors import OutriderError, OutriderWarning
from outrider.engine import Engine, Row
from outrider.engine.round_observer import RowRound
from outrider.engine.warming import warm_up
from outrider.train.online.adaptable import subject_of
from outrider.train.online.collector import Collector, RateLimit
from outrider.train.online.files import SavingError, load_weights
from outrider.train.online.learner import (
    Crashed,
    Failed,
    Flush,
    Flushed,
    Plan,
    Published,
    Ready,
    Restore,
    Stepped,
)
from outrider.train.online.process import ProcessWorker
from outrider.train.online.settings import Settings
from outrider.train.online.state import History, State
from outrider.train.online.subject import Subject
from outrider.train.online.thread import ThreadWorker
from outrider.train.online.version_folder import VersionFolder
from outrider.train.online.versions import Change, Version, Versions

MOST_RESTARTS = 3
IDLE_SECONDS = 0.05
"""How long no round has run where the engine counts as idle."""
STOP_SECONDS = 60.0
"""How long a trainer may take over its last step."""


class Worker(Protocol):
    """What runs a learner."""

    @property
    def num_dropped(self) -> int: ...
    def post(self, message: Any) -> None: ...
    def close(self, timeout: float) -> None: ...


def adapt(
    engine: Engine, folder: str | Path | None = None, settings: Settings | None = None
) -> Adaptation:
    """Begins to adapt an engine's draft model or EAGLE-3 head; ends with the handle's ``stop``.

    The engine drafts with a copy of it from now on, so that other engines with the same one keep
    their weights. Rows that are running keep the one that they have.

    Args:
        engine: an engine with a draft model or an EAGLE-3 head, and a lossless rule.
        folder: where versions and checkpoints are saved; one that holds some is resumed. None
            saves nothing that outlives the handle.
        settings: how to adapt.

    Raises:
        IncompatibleError: a method that adaptation does not support, an engine that is being
            adapted, or a folder of another draft model or without the weights that it names.
        UnsupportedModelError: a draft model of a few bits.
        SavingError: the folder cannot be written.
    """
    settings = settings or Settings()
    with torch.inference_mode(False):
        return Adaptation(engine, subject_of(engine), folder, settings)


class Adaptation:
    """A running adaptation; made by :func:`adapt`. A context manager, which stops it at its end."""

    def __init__(
        self, engine: Engine, subject: Subject, folder: str | Path | None, settings: Settings
    ) -> None:
        self._settings = settings
        self._scratch = None
        if folder is None:
            self._scratch = tempfile.TemporaryDirectory()
            folder = self._scratch.name
        identity = {"draft": subject.architecture, "divergence": settings.divergence}
        self._folder = VersionFolder(Path(folder), identity)
        self._engine, self._subject = engine, subject
        self._condition = Condition()
        self._status = "running"
        self._step = 0
        self._loss: float | None = None
        self._restarts = self._num_flushes = self._flushed = 0
        self._running_rounds, self._last_round = 0, -IDLE_SECONDS
        self._history = History()
        self._warnings: deque[str] = deque()
        self._saver: Thread | None = None
        self._versions = self._begun()
        self._collector = Collector(
            subject.recorder(settings),
            self._post,
            RateLimit(settings.max_tokens_per_second),
            settings.span,
            subject.context(settings),
        )
        self._worker: Worker = self._started()
        warm_up(engine)
        self._watch(True)

    # ------------------------------------------------------------------------ for the user

    @property
    def state(self) -> State:
        """How it stands."""
        with self._condition:
            return State(
                self._status,
                self._versions.serving.number,
                self._versions.on_trial,
                self._step,
                self._loss,
                self._collector.num_positions,
                self._history.num_emitted,
                self._worker.num_dropped,
                self._restarts,
                self._versions.all,
                self._history.points,
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Waits until all complete samples are learned. The resulting version is tried from the
        next round on, or serves, if versions serve without a trial.

        Args:
            timeout: seconds; None waits for as long as it takes.

        Returns:
            Whether they are learned; False too if adaptation is off.
        """
        with self._condition:
            self._num_flushes += 1
            number = self._num_flushes
            self._worker.post(Flush(number))
            self._condition.wait_for(
                lambda: self._flushed >= number or self._status != "running", timeout
            )
            if not self._running_rounds:
                self._note(self._versions.settle())
            return self._flushed >= number

    def save(self, folder: str | Path) -> None:
        """Saves the draft with the weights that serve, as a folder to load it from.

        Raises:
            SavingError: it cannot be written.
        """
        path = Path(folder)
        with self._condition:
            weights = load_weights(self._versions.path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=".saving-") as scratch:
                self._subject.save(weights, Path(scratch))
                path.mkdir(exist_ok=True)
                for file in sorted(Path(scratch).iterdir(), key=lambda f: f.suffix == ".json"):
                    file.replace(path / file.name)
        except OSError as error:
            size = sum(weight.nbytes for weight in weights.values())
            raise SavingError(
                f"cannot write {path}: {error.strerror or error}; it needs about "
                f"{size / 1e6:.1f} MB"
            ) from error

    def _watch(self, on: bool) -> None:
        """Begins to observe the engine's rounds, all of which then draft unless the user asked for
        a governor, or ceases to."""
        self._engine.observed.observer = self if on else None
        if self._engine.governor is not None:
            self._engine.governor.is_suspended = on

    def stop(self) -> None:
        """Ends adaptation. The engine keeps the weights that serve; the trainer saves a checkpoint
        if there is a folder."""
        with self._condition:
            if self._engine.observed.observer is self:
                self._watch(False)
            if self._status == "running":
                self._status = "stopped"
            self._condition.notify_all()
            self._condition.wait_for(lambda: not self._running_rounds, STOP_SECONDS)
            self._versions.close()
        self._worker.close(STOP_SECONDS)
        if self._saver is not None:
            self._saver.join()
        self._save_versions()
        if self._scratch is not None:
            self._scratch.cleanup()

    def __enter__(self) -> Adaptation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # ---------------------------------------------------------- for the engine (RoundObserver)

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Exchanges weights if that is due and no other thread runs a round; see
        ``RoundObserver``."""
        with self._condition:
            if not self._running_rounds:
                self._note(self._versions.begin_round())
            self._running_rounds += 1
        while self._warnings:
            warnings.warn(self._warnings.popleft(), OutriderWarning, stacklevel=2)
        try:
            yield
        finally:
            with self._condition:
                self._running_rounds -= 1
                self._last_round = time.monotonic()
                self._condition.notify_all()

    def observe(self, round_: Round, rows: Sequence[Row]) -> Observed:
        """See ``RoundObserver``."""
        return Observed(self, self._collector.blocks(round_, rows) if self._is_on else [])

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        """Takes over what a round did to a row, and its numbers."""
        with self._condition:
            self._versions.count(done)
            self._history.count(done, self._versions.serving.number)
            if self._is_on:
                self._collector.read(done, line)

    # ----------------------------------------------------------------- messages of the worker

    def _handle(self, message: Any) -> None:
        """Takes a message of the learner, in a thread of the worker's."""
        if isinstance(message, Published):
            self._receive(message)
        with self._condition:
            if isinstance(message, Ready | Stepped):
                self._step = message.step
                self._loss = message.loss if isinstance(message, Stepped) else self._loss
            elif isinstance(message, Flushed):
                self._flushed = message.number
            elif isinstance(message, Failed):
                self._turn_off(message.message)
            elif isinstance(message, Crashed):
                self._restart(message)
            self._condition.notify_all()

    def _receive(self, message: Published) -> None:
        version = Version(message.number, message.step, message.gain)
        try:
            offer = self._versions.offer(version, message.path, load_weights(message.path))
        except (OutriderError, OSError) as error:
            with self._condition:
                self._turn_off(str(error))
            return
        with self._condition:
            self._versions.propose(offer)

    def _restart(self, crash: Crashed) -> None:
        if self._status != "running":
            return
        what = f"the trainer of the draft crashed ({crash.message})"
        if self._restarts == MOST_RESTARTS:
            self._turn_off(f"{what}, as {MOST_RESTARTS} before it did: adaptation is off")
            return
        self._restarts += 1
        self._warnings.append(f"{what}; generation goes on, and the trainer starts again")
        self._worker = self._started()
        if self._flushed < self._num_flushes:
            self._worker.post(Flush(self._num_flushes))

    def _turn_off(self, reason: str) -> None:
        if self._status == "running":
            self._status = reason
            self._warnings.append(f"{reason}; generation goes on with the weights that it has")

    # ------------------------------------------------------------------------------- parts

    @property
    def _is_on(self) -> bool:
        return self._status == "running"

    def _post(self, message: Any) -> None:
        self._worker.post(message)

    def _note(self, change: Change | None) -> None:
        """Tells the trainer, the user and the folder of a change of the weights."""
        if change is None:
            return
        if change == "rolled back":
            self._worker.post(Restore(self._versions.path))
            undone = self._versions.all[-2]
            self._warnings.append(
                f"version {undone.number} of the draft is accepted less than version "
                f"{self._versions.serving.number}, which is back: α {_shown(undone.alpha)} against "
                f"{_shown(undone.alpha_before)}"
            )
        self._saver = Thread(target=self._save_after, args=(self._saver,), daemon=True)
        self._saver.start()

    def _save_after(self, last: Thread | None) -> None:
        """Saves which version serves, outside of the round."""
        if last is not None:
            last.join()
        self._save_versions()

    def _save_versions(self) -> None:
        with self._condition:
            versions, needed = self._versions.all, self._versions.needed
        try:
            self._folder.save(versions, needed)
        except OSError as error:
            with self._condition:
                self._warnings.append(str(error))

    def _pause(self) -> None:
        """Waits until no round has run for a while."""
        with self._condition:
            while self._is_on:
                quiet = time.monotonic() - self._last_round
                if not self._running_rounds and quiet >= IDLE_SECONDS:
                    return
                flushing = self._flushed < self._num_flushes
                if flushing and not self._running_rounds:
                    return
                self._condition.wait(None if self._running_rounds else IDLE_SECONDS - quiet)

    def _plan(self) -> Plan:
        blueprint = self._subject.blueprint()
        return Plan(blueprint, self._versions.path, self._folder.path, self._settings)

    def _started(self) -> Worker:
        if self._settings.where == "process":
            return ProcessWorker(self._plan(), self._handle)
        return ThreadWorker(self._plan(), self._handle, self._pause)

    def _begun(self) -> Versions:
        """The versions of the folder, the last one in service; or the draft's own weights. The
        engine drafts with them."""
        settings = self._settings
        served = self._folder.served()
        version = served[-1] if served else Version(0, 0)
        if served:
            weights = self._folder.weights(version)
        else:
            weights = self._subject.weights()
            self._folder.save_weights(version, weights)
        self._subject.adopt()
        return Versions(
            self._subject,
            replace(version, alpha=None, rounds=0, status="serving"),
            self._folder.weights_path(version),
            weights,
            trial_rounds=settings.trial_rounds,
            false_alarm=settings.false_alarm,
            past=served[:-1],
        )


@dataclass(frozen=True)
class Observed:
    """An adaptation's part in one round (``engine.round_observer.Observation``)."""

    adaptation: Adaptation
    blocks: Sequence[Tensor]

    def read(self, done: RowRound, line: Sequence[list[float]]) -> None:
        """Hands a row's numbers to the adaptation."""
        self.adaptation.read(done, line)


def _shown(alpha: float | None) -> str:
    return "unknown" if alpha is None else f"{alpha:.2f}"
