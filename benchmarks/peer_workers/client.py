"""The benchmark's end of a peer's process."""

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peer_workers.protocol import Answer, Job, Ready

ROOT = Path(__file__).parents[2]
PATIENCE = 300.0
LOADING = 1800.0  # seconds that a row may take to load, where everything is compiled first


class PeerError(Exception):
    """What a peer could not do, in its own words."""


class Client:
    """A worker in its own process; ends with :meth:`close` or with the ``with`` block.

    Args:
        command: what starts it, such as ``["python", "-m", "benchmarks.peer_workers.…"]``.
        log: where its standard error goes.
        patience: seconds that a continuation may take, before the process is killed.
    """

    def __init__(self, command: Sequence[str], log: Path, patience: float = PATIENCE) -> None:
        self.patience = patience
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
            )

    def prepare(self, row: str, job: Job) -> Ready:
        """See :class:`Peer`; raises :class:`PeerError`."""
        request = {"verb": "prepare", "row": row, "job": asdict(job)}
        return Ready(**self._ask(request, max(LOADING, self.patience)))

    def generate(self, row: str, prompt: Sequence[int], num_tokens: int) -> Answer:
        """See :class:`Peer`; raises :class:`PeerError`."""
        request = {"verb": "generate", "row": row, "prompt": list(prompt), "num_tokens": num_tokens}
        return Answer(**self._ask(request, self.patience))

    def close(self) -> None:
        """Ends the process."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any], patience: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # the empty answer below says so
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        impatience = threading.Timer(patience, self.process.kill)
        impatience.start()
        line = self.process.stdout.readline()
        impatience.cancel()
        if not line:
            raise PeerError(f"the process ended with {self.process.wait()}; its log says why")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer
