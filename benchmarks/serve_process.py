"""A server in a process of its own, for the benchmarks of serving."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Server:
    """A running server.

    Attributes:
        url: where it listens, without ``/v1``.
        process: the process.
        log: the file with what it wrote to stderr.
    """

    url: str
    process: subprocess.Popen[str]
    log: Path

    @property
    def resident(self) -> float:
        """Resident memory of the process, in MiB."""
        statm = Path(f"/proc/{self.process.pid}/statm").read_text()
        return int(statm.split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def terminate(self, timeout: float = 120) -> int:
        """Sends SIGTERM and waits; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout)

    def logged(self) -> list[dict[str, object]]:
        """The events of the log."""
        lines = self.log.read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]


@contextmanager
def serving(arguments: Sequence[str], log: Path, threads: int = 1) -> Iterator[Server]:
    """Runs ``outrider serve`` at a free port until the block ends."""
    command = [sys.executable, "-m", "outrider", "serve", *arguments, "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr, text=True, env=environment)
    try:
        yield Server(_url(process, log), process, log)
    finally:
        process.kill()
        process.wait()


def _url(process: subprocess.Popen[str], log: Path) -> str:
    """Waits until the server says where it listens."""
    while process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("serving "):
                return line.split(" at ")[1].split("/v1: ")[0]
        try:
            process.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    raise RuntimeError(f"the server ended with status {process.returncode}: {log.read_text()}")
