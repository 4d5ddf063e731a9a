"""The processes of a sharded run: how they meet, talk, and notice that one of them is gone.

Tensors travel in the collectives of ``torch.distributed`` (gloo on CPUs, NCCL on GPUs), whose
process group ends every wait after a time limit. Everything else travels through the store that
the processes met at: rank 0 pushes messages to a queue per follower. While rank 0 has nothing to
say, its pulse pushes an empty message every two seconds, so a follower that gets none for longer
than the time limit knows that rank 0 is gone. Each follower's pulse counts, too, so that an error
can name the process whose pulse has stopped.
"""

import math
import os
import pickle
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from outrider import __version__
from outrider.cluster.sharded.launch import Launch
from outrider.core.errors import InvalidParameterError, RankError, RankLostError

TIMEOUT = 20.0
"""Seconds that a process waits for another within a round."""

JOIN_TIMEOUT = 600.0
"""Seconds that the processes may take to start, and to load their models."""

_PULSE = 2.0
_POLL = 0.02

LEAST_TIMEOUT = 5.0
"""Seconds; within less a pulse may be late, although its process runs."""


class Ranks:
    """This process and the others of its run. Made by :func:`joined`.

    Args:
        launch: which rank this process is.
        store: where all of them meet, a ``dist.Store`` (whose stubs are incomplete).
        device: where the models run.
        timeout: seconds that a process waits for another within a round.

    Attributes:
        rank: number of this process.
        size: how many processes there are.
        device: where the models run.
    """

    def __init__(self, launch: Launch, store: Any, device: torch.device, timeout: float) -> None:
        self.rank, self.size, self.device = launch.rank, launch.size, device
        self._timeout = timeout
        self._store = store
        self._messages = store.clone()
        self._messages.set_timeout(timedelta(seconds=timeout))
        self._dismissed = self._num_meetings = 0
        self._over = Event()
        self._pulse = Thread(target=self._beat, args=(store.clone(),), daemon=True)
        self._pulse.start()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    # ------------------------------------------------------------------------------- messages

    def send(self, message: object) -> None:
        """Sends a message from rank 0 to all others.

        Raises:
            RankLostError: the store does not answer.
        """
        packed = pickle.dumps(message)
        try:
            for rank in range(1, self.size):
                self._messages.queue_push(f"messages/{rank}", packed)
        except dist.DistError as error:
            self.raise_lost(error)

    def receive(self) -> Any:
        """The next message of rank 0.

        Raises:
            RankLostError: rank 0 has sent nothing for longer than the time limit.
        """
        packed = b""
        try:
            while not packed:
                packed = self._messages.queue_pop(f"messages/{self.rank}")
        except dist.DistError as error:
            self.raise_lost(error)
        return pickle.loads(packed)

    def agree(self, value: Any) -> Any:
        """Rank 0's value, on all ranks."""
        if not self.leads:
            return self.receive()
        self.send(value)
        return value

    def broadcast(self, tensor: Tensor) -> None:
        """Makes a tensor that of rank 0, in place.

        Raises:
            RankLostError: a process does not take part.
        """
        try:
            dist.broadcast(tensor, 0)
        except Exception as error:
            self.raise_lost(error)

    # ------------------------------------------------------------------------------- meetings

    def check_same(self, what: str, facts: Mapping[str, object], remedy: str) -> None:
        """Compares facts of all ranks.

        Args:
            what: a name for these facts.
            facts: by name.
            remedy: what the error recommends.

        Raises:
            RankError: a rank has another value than rank 0; all ranks raise it.
        """
        keys = self._keys(f"facts/{what}")
        self._store.set(keys[self.rank], pickle.dumps(dict(facts)))
        self._wait_for(keys)
        found = [pickle.loads(self._store.get(key)) for key in keys]
        for rank, theirs in enumerate(found):
            for name in [*found[0], *theirs]:
                own, value = theirs.get(name), found[0].get(name)
                if own != value:
                    raise RankError(
                        f"rank {rank} has {name} {own} and rank 0 has {name} {value}: {remedy}"
                    )

    def meet(self, where: str) -> None:
        """Waits until all ranks are there, however long that takes, within ``JOIN_TIMEOUT``."""
        keys = self._keys(f"met/{where}")
        self._store.set(keys[self.rank], b"1")
        self._wait_for(keys)

    def dismiss(self, message: object) -> None:
        """Sends the followers rank 0's last message, and waits until they have read it, since the
        store may end with rank 0."""
        self._dismissed += self.size - 1
        with suppress(RankLostError, dist.DistError):
            self.send(message)
            deadline = time.monotonic() + self._timeout
            while self._store.add("left", 0) < self._dismissed and time.monotonic() < deadline:
                time.sleep(_POLL)

    def leave(self) -> None:
        """Tells rank 0 that this rank has read its last message."""
        with suppress(dist.DistError):
            self._store.add("left", 1)

    # -------------------------------------------------------------------------------- failures

    def fail(self, error: BaseException) -> None:
        """Tells the other ranks why this one ends."""
        reason = str(error).strip() or type(error).__name__
        with suppress(dist.DistError):
            self._store.set(f"failed/{self.rank}", reason.splitlines()[0].encode())

    def raise_lost(self, error: BaseException) -> NoReturn:
        """Raises the error for a rank that does not take part any more, and names it if its pulse
        has stopped or it has said why."""
        raise RankLostError(self._diagnosis(error)) from error

    def close(self) -> None:
        """Leaves the others. Rank 0 leaves last, within a few seconds, since the store may end with
        it, from which the others read why."""
        with suppress(dist.DistError):
            deadline = time.monotonic() + 2 * _PULSE
            num_left = self._store.add("closed", 1)
            while self.leads and num_left < self.size and time.monotonic() < deadline:
                time.sleep(_POLL)
                num_left = self._store.add("closed", 0)
        self._over.set()
        self._pulse.join(2 * _PULSE)
        if dist.is_initialized():
            with suppress(Exception):  # a broken group cannot be left in order
                dist.destroy_process_group()

    def _diagnosis(self, error: BaseException) -> str:
        others = [rank for rank in range(self.size) if rank != self.rank]
        try:
            before = {rank: self._pulse_of(rank) for rank in others}
            deadline = time.monotonic() + 2.5 * _PULSE
            while time.monotonic() < deadline and (silent := self._silent(before)):
                for rank in silent:
                    if reason := self._reason_of(rank):
                        return f"rank {rank} of {self.size} has failed: {reason}"
                time.sleep(_POLL)
            if silent := self._silent(before):
                names = " and ".join(f"rank {rank} ({self._name_of(rank)})" for rank in silent)
                return (
                    f"{names} of {self.size} died or does not answer, and a sharded target needs "
                    f"all its processes: start the run again"
                )
        except dist.DistError:  # the store is part of rank 0, or of torchrun's own process
            return (
                f"rank 0 of {self.size} died or does not answer, and with it the run: start it "
                f"again"
            )
        text = str(error).strip() or type(error).__name__
        return (
            f"the {self.size} processes of the run are out of step ({text.splitlines()[0]}): start "
            f"it again, with a longer time limit if a round takes more than {self._timeout:.0f} s"
        )

    def _silent(self, before: Mapping[int, bytes]) -> list[int]:
        return [rank for rank, pulse in before.items() if self._pulse_of(rank) == pulse]

    def _pulse_of(self, rank: int) -> bytes:
        return self._store.get(f"pulse/{rank}") if self._store.check([f"pulse/{rank}"]) else b""

    def _reason_of(self, rank: int) -> str:
        key = f"failed/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _name_of(self, rank: int) -> str:
        key = f"name/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else "never started"

    def _keys(self, what: str) -> list[str]:
        """A key per rank, new at each call; all ranks call this in the same order."""
        self._num_meetings += 1
        return [f"{what}/{self._num_meetings}/{rank}" for rank in range(self.size)]

    def _wait_for(self, keys: list[str]) -> None:
        deadline = time.monotonic() + JOIN_TIMEOUT
        try:
            while not self._store.check(keys):
                for rank in range(self.size):
                    if (reason := self._reason_of(rank)) and not self._store.check(keys):
                        raise RankLostError(f"rank {rank} of {self.size} has failed: {reason}")
                if time.monotonic() > deadline:
                    missing = [key for key in keys if not self._store.check([key])]
                    raise RankLostError(
                        f"rank {missing[0].rpartition('/')[2]} of {self.size} has not come within "
                        f"{JOIN_TIMEOUT:.0f} s: start the run again"
                    )
                time.sleep(_POLL)
        except dist.DistError as error:
            self.raise_lost(error)

    def _beat(self, store: Any) -> None:
        """Counts, and on rank 0 sends an empty message, until the run is over."""
        number = 0
        with suppress(dist.DistError):  # the main thread finds out by itself
            store.set(f"name/{self.rank}", f"process {os.getpid()} on {socket.gethostname()}")
            while True:
                store.set(f"pulse/{self.rank}", str(number))
                for rank in range(1, self.size if self.leads else 1):
                    store.queue_push(f"messages/{rank}", b"")
                if self._over.wait(_PULSE):
                    return
                number += 1


@contextmanager
def joined(launch: Launch, timeout: float = TIMEOUT) -> Iterator[Ranks]:
    """Meets the other processes, makes the process group, and leaves it at the end.

    Args:
        launch: which rank this process is.
        timeout: seconds that a process waits for another within a round.

    Raises:
        InvalidParameterError: a time limit below ``LEAST_TIMEOUT``.
        RankError: a process has other versions of Outrider, torch or transformers.
        RankLostError: a process does not come.
    """
    if not LEAST_TIMEOUT <= timeout < math.inf:
        raise InvalidParameterError(
            f"timeout={timeout:g}: must be at least {LEAST_TIMEOUT:g} seconds, since a process "
            f"that runs gives a sign every {_PULSE:g}"
        )
    device = _device(launch)
    store = _store(launch)
    ranks = Ranks(launch, dist.PrefixStore("outrider", store), device, timeout)
    try:
        ranks.check_same("versions", _versions(), "install the same versions everywhere")
        if launch.size > 1:
            _make_group(ranks, launch, store, timeout)
        yield ranks
    except BaseException as error:
        ranks.fail(error)
        raise
    finally:
        ranks.close()


def _make_group(ranks: Ranks, launch: Launch, store: dist.Store, timeout: float) -> None:
    """Makes the process group, and waits until all ranks have: a rank that left before, such as for
    an error of its settings, would break connections that another is still making.

    Raises:
        RankLostError: a process does not take part.
    """
    try:
        dist.init_process_group(
            "nccl" if ranks.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store),
            rank=launch.rank,
            world_size=launch.size,
            timeout=timedelta(seconds=timeout),
            device_id=ranks.device if ranks.device.type == "cuda" else None,
        )
    except RuntimeError as error:  # of gloo, NCCL and the store
        ranks.raise_lost(error)
    ranks.meet("group")


def _store(launch: Launch) -> dist.Store:
    """Where the processes meet.

    Raises:
        RankLostError: the others do not come.
    """
    if launch.size == 1:
        return dist.HashStore()
    limit = timedelta(seconds=JOIN_TIMEOUT)
    try:
        store, _, _ = next(dist.rendezvous("env://", launch.rank, launch.size, timeout=limit))
    except (dist.DistError, RuntimeError) as error:
        raise RankLostError(
            f"rank {launch.rank} of {launch.size} found no others: {str(error).splitlines()[0]}"
        ) from error
    return store


def _device(launch: Launch) -> torch.device:
    """The GPU of this process, where there are GPUs.

    Raises:
        RankError: fewer GPUs than processes on this machine.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    found = torch.cuda.device_count()
    if launch.local_rank >= found:
        raise RankError(
            f"local rank {launch.local_rank} has no GPU: this machine has {found}; start as many "
            f"processes as there are GPUs (torchrun --nproc-per-node {found})"
        )
    torch.cuda.set_device(launch.local_rank)
    return torch.device("cuda", launch.local_rank)


def _versions() -> dict[str, str]:
    return {
        "outrider": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }
