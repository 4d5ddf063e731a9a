"""The server against its own engine, and against other servers, at 1, 4, 8 and 16 clients.

    python -m benchmarks.serving
    python -m benchmarks.serving --clients 1 8 --requests 2 --repeats 1     # a quick look
    python -m benchmarks.serving --pair smollm2 --dtype bfloat16
    python -m benchmarks.serving --ours --clients 1 8 --repeats 40          # the bars alone

All have the same target in the same precision and the same prompts as token ids, the same number of
new tokens, temperature 0 and threads. SmolLM2-135M-Instruct drafts by its embedded head. A client
sends one request after the other, as streams; the clients of a server are a process of their own,
whose processor time is not counted where the benchmark has one processor only (``taskset -c 0``).
They take their requests from one queue, as the engine does, which decodes as many prompts with as
many rows, in this process. OpenVINO has no server of its own: requests enter its continuous
batching in its process, as many at a time as there are clients. In each repeat every row runs once,
in an order that rotates; only one of them runs at a time. docs/peers.md says how the peers are
installed; those that are not are named on the page. A run that was interrupted goes on where it
ended. Writes ``benchmarks/results/serving.json`` and ``serving.md``, or ``serving_smollm2``; with
``--ours``, which leaves out the peers, so that many repeats take little time, ``serving_ours`` or
``serving_smollm2_ours``.

Bars: at one client the server has at least 0.97 of the engine's tokens per second, at eight at
least 0.9; a server with drafts has at least 0.97 of one without, whatever the number of clients.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch

import outrider
from benchmarks.page import about, bars_table, header, parser, publish
from benchmarks.page import table as markdown_table
from benchmarks.peer_workers.client import Client, PeerError
from benchmarks.peer_workers.gguf_export import exported
from benchmarks.peer_workers.pairs import PAIRS, Pair
from benchmarks.peer_workers.protocol import KINDS, Batch, Job
from benchmarks.peers import rotated, say, texts
from benchmarks.serve_process import serving
from outrider import Sampling
from outrider.lab.metadata import hardware
from outrider.runtime.hf.load import load_tokenizer

METHODS = {"embedded": ("plain", "speculative"), "smollm2": ("plain", "eagle3")}
"""What is measured of each pair."""

TITLES = {"embedded": "embedded target", "smollm2": "SmolLM2-135M-Instruct"}
BARS = {1: 0.97, 8: 0.9}
NEVER_SLOWER = 0.97
PROMPT_TOKENS = 48
LIMIT = 1800.0  # seconds of a measurement
CLIENTS = ", clients"
"""Of a row, its clients' processor time over the server's seconds, in place of a speed."""

Table = dict[str, dict[int, list[float]]]
"""Speeds by row and number of clients, one per repeat."""

Prompts = Sequence[Sequence[int]]
Measure = Callable[[int, Prompts, int], Batch]
"""From the number of clients, their prompts and the new tokens of each to the time."""


class Speeds:
    """Tokens per second by row, clients and repeat, kept in a file, so that a run that was
    interrupted goes on where it ended.

    Args:
        path: the file.
        settings: what the speeds depend on; those of other settings are dropped.
    """

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        self._settings = settings
        self._found: dict[str, float] = {}
        if path.exists():
            kept = json.loads(path.read_text())
            if kept["settings"] == settings:
                self._found = kept["speeds"]

    def get(self, row: str, clients: int, repeat: int) -> float | None:
        """A speed; None if it was not measured."""
        return self._found.get(f"{row}|{clients}|{repeat}")

    def add(self, row: str, clients: int, repeat: int, speed: float) -> None:
        """Notes a speed in the file."""
        self._found[f"{row}|{clients}|{repeat}"] = speed
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps({"settings": self._settings, "speeds": self._found}))

    def of(self, row: str, clients: int, repeats: int) -> list[float]:
        """The speeds of all repeats."""
        found = [self.get(row, clients, repeat) for repeat in range(repeats)]
        return [speed for speed in found if speed is not None]


@dataclass
class Row:
    """Something that decodes.

    Attributes:
        name: in the table.
        measure: decodes prompts.
    """

    name: str
    measure: Measure


def draft_of(pair: Pair, method: str) -> str | None:
    """What a method of :data:`METHODS` drafts with."""
    drafts = {"plain": None, "speculative": str(pair.draft), "eagle3": pair.head}
    return drafts[method]


def engine_row(given: argparse.Namespace, pair: Pair, method: str) -> Row:
    """The engine, with as many rows as there are clients."""
    engines = {
        num: outrider.load(
            str(pair.target),
            draft_of(pair, method),
            method,
            dtype=given.dtype,
            max_batch_size=num,
            compile=given.compile,
        )
        for num in given.clients
    }

    def measure(num: int, prompts: Prompts, num_tokens: int) -> Batch:
        sampling = Sampling(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        engines[num].generate([list(ids) for ids in prompts], sampling)
        return Batch(time.perf_counter() - began)

    return Row(f"engine, {method}", measure)


def worker_row(name: str, worker: Client) -> Row:
    """A worker that decodes as many prompts at a time as there are clients."""

    def measure(num: int, prompts: Prompts, num_tokens: int) -> Batch:
        return worker.decode_all(prompts, num, num_tokens)

    return Row(name, measure)


def http_row(name: str, url: str, more: dict[str, Any], log: Path, stack: ExitStack) -> Row:
    """A server with OpenAI's interface, and a process with its clients."""
    module = "benchmarks.peer_workers.http_clients"
    command = [sys.executable, "-m", module, url, json.dumps(more)]
    return worker_row(name, stack.enter_context(Client(command, log, LIMIT)))


def openvino_row(given: argparse.Namespace, job: Job, most: int, stack: ExitStack) -> Row:
    """OpenVINO's continuous batching.

    Raises:
        FileNotFoundError: its environment is not installed.
        PeerError: it cannot load the model.
    """
    python = Path(given.openvino or given.peers / "openvino" / "bin" / "python")
    if not python.exists():
        raise FileNotFoundError(f"no interpreter at {python}")
    command = [str(python), "-m", "benchmarks.peer_workers.openvino_batching"]
    worker = stack.enter_context(Client(command, given.exports / "openvino.log", LIMIT))
    worker.prepare(str(most), job)
    return worker_row("OpenVINO's continuous batching, plain", worker)


@contextmanager
def llama_server(program: str, weights: Path, job: Job, slots: int) -> Iterator[str]:
    """llama.cpp's server with these weights; its URL."""
    kind = KINDS[job.dtype]
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--model", str(weights), "--port", str(port), "--parallel", str(slots)]
    command += ["--ctx-size", str(slots * job.max_length), "--threads", str(job.threads)]
    command += ["--cache-type-k", kind, "--cache-type-v", kind]
    unread = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=unread, stderr=unread)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(url, process)
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait(url: str, process: subprocess.Popen[Any]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise RuntimeError(f"llama-server ended with status {process.returncode}")
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise TimeoutError("llama-server was not ready after a minute")


def our_rows(given: argparse.Namespace, pair: Pair, most: int, stack: ExitStack) -> list[Row]:
    """The engine and its server, by method."""
    rows: list[Row] = []
    for method in METHODS[given.pair]:
        rows.append(engine_row(given, pair, method))
        serve = [str(pair.target), "--method", method, "--dtype", given.dtype]
        serve += ["--compile", given.compile, "--max-batch-size", str(most)]
        serve += ["--prefix-cache", "0"]
        draft = draft_of(pair, method)
        serve += [] if draft is None else ["--draft", draft]
        log = given.exports / f"serve-{method}.log"
        server = stack.enter_context(serving(serve, log, given.threads))
        rows.append(http_row(f"outrider serve, {method}", server.url, {}, log, stack))
    return rows


def peer_rows(
    given: argparse.Namespace, pair: Pair, most: int, stack: ExitStack
) -> tuple[list[Row], list[str]]:
    """The other servers that are installed, and why the others are missing."""
    rows: list[Row] = []
    missing: list[str] = []
    job = Job(
        str(pair.target),
        str(pair.draft),
        1,
        given.threads,
        PROMPT_TOKENS + given.max_new_tokens,
        str(given.exports.absolute()),
        given.dtype,
    )
    built = given.peers / "llama.cpp" / "bin" / "llama-server"
    program = given.llama_server or shutil.which("llama-server") or built
    if Path(program).exists():
        weights = exported(job, job.target, KINDS[job.dtype])
        url = stack.enter_context(llama_server(str(program), weights, job, most))
        log = given.exports / "llama.cpp.log"
        rows.append(http_row("llama.cpp's server, plain", url, {"cache_prompt": False}, log, stack))
    else:
        missing.append(f"llama.cpp's server: not installed, there is no {program}")
    try:
        rows.append(openvino_row(given, job, most, stack))
    except (FileNotFoundError, PeerError) as error:
        missing.append(f"OpenVINO's continuous batching: not measured, {error}")
    return rows, missing


def run(rows: Sequence[Row], prompts: Prompts, given: argparse.Namespace, speeds: Speeds) -> None:
    """Measures every row in every repeat, once it is warm."""
    for row in rows:
        for num in given.clients:
            row.measure(num, prompts[:num], min(8, given.max_new_tokens))
        say(f"{row.name}: ready")
    for repeat in range(given.repeats):
        for num in given.clients:
            several = [prompts[i % len(prompts)] for i in range(num * given.requests)]
            for row in rotated(list(rows), repeat):
                if speeds.get(row.name, num, repeat) is not None:
                    continue
                batch = row.measure(num, several, given.max_new_tokens)
                seconds = batch.seconds - batch.clients_seconds
                speed = len(several) * given.max_new_tokens / seconds
                speeds.add(row.name, num, repeat, speed)
                speeds.add(f"{row.name}{CLIENTS}", num, repeat, batch.clients_seconds / seconds)
                say(f"{row.name}, {num} clients: {speed:.1f} tokens/s")


def ratios(
    table: Table, methods: Sequence[str], clients: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Of each method, the server's speed over the engine's."""
    return {
        method: _medians(table[_server(method)], table[f"engine, {method}"], clients)
        for method in methods
    }


def gains(
    table: Table, methods: Sequence[str], clients: Sequence[int]
) -> dict[str, dict[int, float]]:
    """Of each method that drafts, the server's speed over that of the first method, which does
    not."""
    plain, *drafting = methods
    return {
        method: _medians(table[_server(method)], table[_server(plain)], clients)
        for method in drafting
    }


def _server(method: str) -> str:
    return f"outrider serve, {method}"


def _medians(
    these: dict[int, list[float]], those: dict[int, list[float]], clients: Sequence[int]
) -> dict[int, float]:
    """By number of clients, the median over the repeats of the ratio of two rows."""
    return {
        num: statistics.median(a / b for a, b in zip(these[num], those[num], strict=True))
        for num in clients
    }


def page(report: dict[str, Any], table: Table) -> str:
    """The results as a page."""
    where = report["about"]
    clients = where["clients"]
    lines = header(
        "Servers",
        where,
        f"{TITLES[where['pair']]} in {where['dtype']}, compile={where['compile']!r}. Tokens per "
        f"second of all clients together, {where['max_new_tokens']} new tokens per request, "
        f"temperature 0; median of {where['repeats']} interleaved repeats (least to most). Load "
        f"average before: {where['load']:.1f}.{_clients_told(report['clients'])}",
    )
    heads = ["", *(f"{num} clients" if num > 1 else "1 client" for num in clients)]
    lines += markdown_table(
        heads,
        (
            [name, *(_cell(by_clients[num]) for num in clients)]
            for name, by_clients in table.items()
        ),
    )
    lines += ["", *(f"{each}." for each in where["missing"])]
    lines += bars_table((claim, f"{ratio:.3f}", ratio >= bar) for claim, ratio, bar in bars(report))
    return "\n".join([*lines, ""])


def bars(report: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Each bar: what it demands, what was measured, and the least that meets it."""
    found = [
        (f"server over engine, {method}, {num} clients: ≥ {BARS[num]}", ratio, BARS[num])
        for method, by_clients in report["ratios"].items()
        for num, ratio in by_clients.items()
        if num in BARS
    ]
    for by_clients in report["gains"].values():
        for num, gain in by_clients.items():
            claim = f"server with drafts over server without, {num} clients: ≥ {NEVER_SLOWER}"
            found.append((claim, gain, NEVER_SLOWER))
    return found


def _clients_told(shares: dict[str, dict[int, float]]) -> str:
    """What the page says of clients that share the server's processor; nothing of others."""
    ours = [by_clients for name, by_clients in shares.items() if name.startswith("outrider serve")]
    if not any(map(any, map(dict.values, ours))):
        return ""
    told = ", ".join(
        f"{statistics.mean(each[num] for each in ours):.1%} at {num}" for num in ours[0]
    )
    return (
        f" Everything ran on one processor; the clients' own processor time is not counted. For "
        f"Outrider's server it comes to {told}."
    )


def _cell(speeds: Sequence[float]) -> str:
    return f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"


def options() -> argparse.ArgumentParser:
    """The command line."""
    made = parser(__doc__)
    made.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    made.add_argument("--requests", type=int, default=2, help="of each client")
    made.add_argument("--max-new-tokens", type=int, default=64)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--pair", choices=METHODS, default="embedded")
    made.add_argument("--dtype", choices=KINDS, default="float32")
    made.add_argument("--compile", default="auto")
    made.add_argument("--ours", action="store_true", help="leave out the other servers")
    made.add_argument("--llama-server", default=os.environ.get("OUTRIDER_LLAMA_SERVER"))
    made.add_argument("--openvino", type=Path, help="the interpreter of OpenVINO's environment")
    made.add_argument("--peers", type=Path, default=Path("runs/peers"), help="see docs/peers.md")
    made.add_argument("--exports", type=Path, default=Path("runs/peers/exports"))
    made.add_argument(
        "--kept", type=Path, default=Path("runs/serve/serving.json"), help="of a run in progress"
    )
    return made


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; the exit status says whether the bars are met."""
    given = options().parse_args(arguments)
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    given.exports.mkdir(parents=True, exist_ok=True)
    pair, methods = PAIRS[given.pair](given.exports), METHODS[given.pair]
    tokenizer: Any = load_tokenizer(pair.target)
    prompts = [tokenizer(text)["input_ids"][:PROMPT_TOKENS] for text in texts(9)]
    names = ("pair", "dtype", "clients", "requests", "max_new_tokens", "repeats", "compile")
    settings = {name: getattr(given, name) for name in names}
    speeds = Speeds(given.kept, settings | {"threads": given.threads, "hardware": hardware()})
    with ExitStack() as stack:
        most = max(given.clients)
        rows = our_rows(given, pair, most, stack)
        peers, missing = ([], []) if given.ours else peer_rows(given, pair, most, stack)
        for each in missing:
            say(each)
        rows += peers
        run(rows, prompts, given, speeds)
    table = {
        row.name: {num: speeds.of(row.name, num, given.repeats) for num in given.clients}
        for row in rows
    }
    command = " ".join(["python -m benchmarks.serving", *(arguments or sys.argv[1:])])
    shares = {
        row.name: {
            num: statistics.median(speeds.of(row.name + CLIENTS, num, given.repeats))
            for num in given.clients
        }
        for row in rows
    }
    report = {
        "about": about(command, load=load, missing=missing, **settings),
        "rows": table,
        "clients": shares,
        "ratios": ratios(table, methods, given.clients),
        "gains": gains(table, methods, given.clients),
    }
    name = "serving" if given.pair == "embedded" else f"serving_{given.pair}"
    name += "_ours" if given.ours else ""
    publish(given.out, name, report, page(report, table))
    given.kept.unlink(missing_ok=True)
    return 0 if all(ratio >= bar for _, ratio, bar in bars(report)) else 1


if __name__ == "__main__":
    sys.exit(main())
