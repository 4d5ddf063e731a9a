"""The client of a worker process, used by the benchmark."""

import json
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peer_workers.protocol import Answer, Batch, Job, Likelihood, Ready

ROOT = Path(__file__).parents[2]
GENERATE_SECONDS = 300.0  # limit for a continuation
PREPARE_SECONDS = 1800.0  # limit for loading a row, which may include compilation


class PeerError(Exception):
    """A worker failed; the message is the worker's."""


class Client:
    """A worker in its own process, which ends with :meth:`close` or with the ``with`` block.

    Args:
        command: that starts the worker, such as ``["python", "-m", "benchmarks.peer_workers.…"]``.
        log: file for its standard error.
        limit: seconds for a continuation, after which the process is killed.
    """

    def __init__(self, command: Sequence[str], log: Path, limit: float = GENERATE_SECONDS) -> None:
        self.limit = limit
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
        return Ready(**self._ask(request, max(PREPARE_SECONDS, self.limit)))

    def generate(self, row: str, prompt: Sequence[int], num_tokens: int) -> Answer:
        """See :class:`Peer`; raises :class:`PeerError`."""
        request = {"verb": "generate", "row": row, "prompt": list(prompt), "num_tokens": num_tokens}
        return Answer(**self._ask(request, self.limit))

    def decode_all(self, prompts: Sequence[Sequence[int]], clients: int, num_tokens: int) -> Batch:
        """See :class:`Batching`; raises :class:`PeerError`."""
        request = {"verb": "decode_all", "prompts": [list(each) for each in prompts]}
        return Batch(
            **self._ask({**request, "clients": clients, "num_tokens": num_tokens}, self.limit)
        )

    def likelihood(self, texts: Sequence[Sequence[int]]) -> Likelihood:
        """See :class:`Scoring`; raises :class:`PeerError`."""
        request = {"verb": "likelihood", "texts": [list(each) for each in texts]}
        return Likelihood(**self._ask(request, self.limit))

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

    def _ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):  # the missing answer below raises an error
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        if not line:
            raise PeerError(f"the process ended with code {self.process.wait()}; see its log")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerError(answer["error"])
        return answer
