"""llama.cpp: its own server with a draft model, called over HTTP with token ids.

The server is used because it implements llama.cpp's speculative decoding; llama-cpp-python can only
draft from the prompt. The rows are ``plain`` and ``speculative`` in the job's precision, or in the
one that their name ends in: `` f32``, `` f16`` or `` bf16``, or with weights in blocks, `` q8_0``,
`` q4_0`` or `` q4_1``. The KV cache has the precision of the weights. With blocks, it has that of
the job, and so does the draft, whose width may be no multiple of a block. The server's prompt cache
is off, so every prompt is computed.
"""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.peer_workers.gguf_export import exported
from benchmarks.peer_workers.protocol import (
    BLOCKS,
    KINDS,
    SEED,
    Answer,
    Job,
    Ready,
    serve,
    watch,
)

START_SECONDS = 120


def find_server() -> str:
    """The server: ``OUTRIDER_LLAMA_SERVER``, one beside this interpreter, or one on the path.

    Raises:
        FileNotFoundError: there is none.
    """
    beside = Path(sys.executable).parent / "llama-server"
    found = os.environ.get("OUTRIDER_LLAMA_SERVER") or (
        str(beside) if beside.exists() else shutil.which("llama-server")
    )
    if not found:
        raise FileNotFoundError("no llama-server beside the interpreter or on the path")
    return found


class Server:
    """A ``llama-server`` process, whose output goes to the log of the worker. It closes idle
    connections, so every request opens a new one."""

    def __init__(self, command: list[str]) -> None:
        with closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
        )
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        self._wait(time.monotonic() + START_SECONDS)

    def connect(self) -> None:
        """Opens a new connection, which is not part of the timed request."""
        self.connection.close()
        self.connection.connect()

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """Requests a completion and returns the server's answer."""
        text = json.dumps(body)
        self.connection.request("POST", "/completion", text, {"Content-Type": "application/json"})
        response = self.connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != 200:
            raise RuntimeError(f"llama-server answered {response.status}: {answer}")
        return answer

    def close(self) -> None:
        """Ends the process."""
        self.connection.close()
        self.process.terminate()
        self.process.wait()

    def _wait(self, deadline: float) -> None:
        while True:
            if self.process.poll() is not None:
                code = self.process.returncode
                raise RuntimeError(f"llama-server ended with {code}; see the worker's log")
            try:
                self.connection.request("GET", "/health")
                response = self.connection.getresponse()
                response.read()
                if response.status == 200:
                    return
            except OSError:
                self.connection.close()
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"llama-server was not ready after {START_SECONDS} s")
            time.sleep(0.05)


class LlamaCpp:
    """A worker with one server per row; servers map their weights from shared files."""

    def __init__(self) -> None:
        self.server = find_server()
        self.servers: dict[str, Server] = {}
        self.temperature = 0.0

    def prepare(self, row: str, job: Job) -> Ready:
        method, _, kind = row.partition(" ")
        kind = kind or KINDS[job.dtype]
        with watch() as exporting:
            target = exported(job, job.target, kind)
            draft_kind = whole(job, kind)
            draft = exported(job, job.draft, draft_kind) if method == "speculative" else None
        command = [self.server, *options(job, target, draft, kind)]
        self.temperature = job.temperature
        with watch() as spent:
            self.servers[row] = Server(command)
        return Ready(
            precision=next((dtype for dtype, name in KINDS.items() if name == kind), kind),
            threads=job.threads,
            version=self._version(),
            seconds=spent.seconds,
            export_seconds=exporting.seconds,
        )

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        body = {
            "prompt": prompt,
            "n_predict": num_tokens,
            "temperature": self.temperature,
            "seed": SEED,
            "samplers": ["temperature"],
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        self.servers[row].connect()
        with watch() as spent:
            answer = self.servers[row].ask(body)
        timings = answer["timings"]
        return Answer(
            answer["tokens"], spent.seconds, timings.get("draft_n"), timings.get("draft_n_accepted")
        )

    def close(self) -> None:
        for server in self.servers.values():
            server.close()
        self.servers.clear()

    def _version(self) -> str:
        done = subprocess.run([self.server, "--version"], capture_output=True, text=True)
        lines = (done.stderr + done.stdout).splitlines()
        return next((line for line in lines if "version" in line), "llama.cpp")


def whole(job: Job, kind: str) -> str:
    """The precision of what is not in blocks."""
    return KINDS[job.dtype] if kind in BLOCKS else kind


def options(job: Job, target: Path, draft: Path | None, kind: str) -> list[str]:
    """The options of the server's command line, without its address."""
    threads, kv = str(job.threads), whole(job, kind)
    found = ["-m", str(target), "-c", str(job.max_length), "-np", "1", "-t", threads]
    found += ["-tb", threads, "-ctk", kv, "-ctv", kv, "--no-warmup", "--cache-ram", "0"]
    if draft is not None:
        found += ["-md", str(draft), "--spec-type", "draft-simple", "-td", threads]
        found += ["-tbd", threads, "-ctkd", kv, "-ctvd", kv]
        found += ["--spec-draft-n-max", str(job.num_speculative_tokens), "--spec-draft-n-min", "0"]
        found += ["--spec-draft-p-min", "0"]
    return found


if __name__ == "__main__":
    serve(LlamaCpp())
