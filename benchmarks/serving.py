"""The server against its own engine, and against other servers, at 1, 4, 8 and 16 clients.

    python -m benchmarks.serving
    python -m benchmarks.serving --clients 1 8 --requests 2 --repeats 1     # a quick look

All have the embedded target in float32 and the same prompts as token ids, the same number of new
tokens, temperature 0 and threads. A client sends one request after the other, as streams. The
engine decodes as many prompts with as many rows, in this process. In each repeat every row runs
once, in an order that rotates; only one of them runs at a time. llama.cpp's server takes part if
``--llama-server`` or the environment variable ``OUTRIDER_LLAMA_SERVER`` names it. Writes
``benchmarks/results/serving.json`` and ``serving.md``.

Bars: at one client the server has at least 0.97 of the engine's tokens per second, at eight at
least 0.9.
"""

import argparse
import asyncio
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
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import torch

import outrider
from benchmarks.peer_workers.gguf_export import export
from benchmarks.peer_workers.pairs import embedded
from benchmarks.peers import rotated, say, texts
from benchmarks.serve_process import serving
from outrider import Sampling
from outrider.lab.metadata import hardware
from outrider.runtime.hf.load import load_tokenizer

RESULTS = Path("benchmarks/results")
METHODS = ("plain", "speculative")
BARS = {1: 0.97, 8: 0.9}

Prompts = Sequence[Sequence[int]]
Measure = Callable[[int, Prompts, int], float]
"""From the number of clients, their prompts and the new tokens of each to seconds."""


@dataclass
class Row:
    """Something that decodes.

    Attributes:
        name: in the table.
        measure: decodes prompts.
        speeds: tokens per second by the number of clients, one per repeat.
    """

    name: str
    measure: Measure
    speeds: dict[int, list[float]]

    def median(self, clients: int) -> float:
        return statistics.median(self.speeds[clients])


def engine_row(target: Path, draft: Path, method: str, clients: Sequence[int], compile: Any) -> Row:
    """The engine, with as many rows as there are clients."""
    pair = (str(target), str(draft) if method == "speculative" else None)
    engines = {
        num: outrider.load(*pair, method, dtype="float32", max_batch_size=num, compile=compile)
        for num in clients
    }

    def measure(num: int, prompts: Prompts, num_tokens: int) -> float:
        sampling = Sampling(temperature=0, max_new_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        engines[num].generate([list(ids) for ids in prompts], sampling)
        return time.perf_counter() - began

    return Row(f"engine, {method}", measure, {num: [] for num in clients})


def http_row(name: str, url: str, clients: Sequence[int], more: dict[str, Any]) -> Row:
    """A server with OpenAI's interface."""

    def measure(num: int, prompts: Prompts, num_tokens: int) -> float:
        body = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **more}
        return asyncio.run(_clients(url, num, prompts, body))

    return Row(name, measure, {num: [] for num in clients})


async def _clients(url: str, num: int, prompts: Prompts, body: dict[str, Any]) -> float:
    """Seconds in which so many clients have all prompts continued, as streams."""
    waiting = list(prompts)
    limits = httpx.Limits(max_connections=num, max_keepalive_connections=num)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as http:

        async def client() -> None:
            while waiting:
                request = {**body, "prompt": list(waiting.pop(0)), "stream": True}
                async with http.stream("POST", "/v1/completions", json=request) as response:
                    if response.status_code != 200:
                        raise RuntimeError((await response.aread()).decode())
                    async for _ in response.aiter_bytes():
                        pass

        await http.get("/health")
        began = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(num)])
        return time.perf_counter() - began


@contextmanager
def llama_server(
    program: str, target: Path, exports: Path, slots: int, context: int, threads: int
) -> Iterator[str]:
    """llama.cpp's server with the same weights; its URL."""
    weights = exports / "embedded-f32.gguf"
    if not weights.exists():
        export(target, weights, "f32")
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--model", str(weights), "--port", str(port), "--parallel", str(slots)]
    command += ["--ctx-size", str(slots * context), "--threads", str(threads)]
    command += ["--cache-type-k", "f32", "--cache-type-v", "f32"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **quiet)
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


def run(rows: Sequence[Row], prompts: Prompts, given: argparse.Namespace) -> None:
    """Measures every row in every repeat, once it is warm."""
    for row in rows:
        for num in given.clients:
            row.measure(num, prompts[:num], min(8, given.max_new_tokens))
        say(f"{row.name}: ready")
    for repeat in range(given.repeats):
        for num in given.clients:
            several = [prompts[i % len(prompts)] for i in range(num * given.requests)]
            for row in rotated(list(rows), repeat):
                seconds = row.measure(num, several, given.max_new_tokens)
                row.speeds[num].append(len(several) * given.max_new_tokens / seconds)
                say(f"{row.name}, {num} clients: {row.speeds[num][-1]:.1f} tokens/s")


def ratios(rows: Sequence[Row], clients: Sequence[int]) -> dict[str, dict[int, float]]:
    """Of each method, the server's speed over the engine's: the median over the repeats."""
    by_name = {row.name: row for row in rows}
    found: dict[str, dict[int, float]] = {}
    for method in METHODS:
        engine, server = by_name[f"engine, {method}"], by_name[f"outrider serve, {method}"]
        found[method] = {
            num: statistics.median(
                s / e for s, e in zip(server.speeds[num], engine.speeds[num], strict=True)
            )
            for num in clients
        }
    return found


def markdown(rows: Sequence[Row], about: dict[str, Any], found: dict[str, Any]) -> str:
    """The results as a page."""
    clients = about["clients"]
    lines = [
        "# Servers",
        "",
        f"{about['date']}, {about['hardware']}, {about['threads']} threads, torch "
        f"{about['torch']}; embedded target in float32, compile={about['compile']!r}. Tokens per "
        f"second of all clients together, {about['max_new_tokens']} new tokens per request, "
        f"temperature 0; median of {about['repeats']} interleaved repeats (least to most). Load "
        f"average before: {about['load']:.1f}.",
        "",
        "| | " + " | ".join(f"{num} clients" if num > 1 else "1 client" for num in clients) + " |",
        "|---|" + "---:|" * len(clients),
    ]
    for row in rows:
        cells = [
            f"{row.median(num):.1f} ({min(row.speeds[num]):.1f} to {max(row.speeds[num]):.1f})"
            for num in clients
        ]
        lines.append(f"| {row.name} | " + " | ".join(cells) + " |")
    lines += ["", "The server over its engine:", ""]
    for method, by_clients in found.items():
        for num, ratio in by_clients.items():
            bar = BARS.get(num)
            wanted = "" if bar is None else f" (bar: {bar}, {'met' if ratio >= bar else 'missed'})"
            lines.append(f"- {method}, {num} clients: {ratio:.3f}{wanted}")
    lines += ["", f"Command: `{about['command']}`", ""]
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--clients", type=int, nargs="+", default=[1, 4, 8, 16])
    options.add_argument("--requests", type=int, default=4, help="of each client")
    options.add_argument("--max-new-tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--compile", default="auto")
    options.add_argument("--llama-server", default=os.environ.get("OUTRIDER_LLAMA_SERVER"))
    options.add_argument("--exports", type=Path, default=Path("runs/benchmarks/peers"))
    options.add_argument("--results", type=Path, default=RESULTS)
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark; the exit status says whether the bars are met."""
    given = parser().parse_args(arguments)
    torch.set_num_threads(given.threads)
    load = os.getloadavg()[0]
    pair = embedded(given.exports)
    tokenizer: Any = load_tokenizer(pair.target)
    prompts = [tokenizer(text)["input_ids"][:48] for text in texts(9)]
    most = max(given.clients)
    with ExitStack() as stack:
        rows: list[Row] = []
        for method in METHODS:
            rows.append(engine_row(pair.target, pair.draft, method, given.clients, given.compile))
            serve = [str(pair.target), "--method", method, "--dtype", "float32"]
            serve += ["--compile", given.compile, "--max-batch-size", str(most)]
            serve += ["--prefix-cache", "0"]
            serve += ["--draft", str(pair.draft)] if method == "speculative" else []
            log = given.exports / f"serve-{method}.log"
            server = stack.enter_context(serving(serve, log, given.threads))
            rows.append(http_row(f"outrider serve, {method}", server.url, given.clients, {}))
        program = given.llama_server or shutil.which("llama-server")
        if program:
            peer = llama_server(
                program, pair.target, given.exports, most, 48 + given.max_new_tokens, given.threads
            )
            url, more = stack.enter_context(peer), {"cache_prompt": False}
            rows.append(http_row("llama.cpp's server, plain", url, given.clients, more))
        else:
            say("llama.cpp's server: not found; --llama-server names it")
        run(rows, prompts, given)
    found = ratios(rows, given.clients)
    about = {
        "date": str(date.today()),
        "hardware": hardware(),
        "torch": torch.__version__,
        "load": load,
        "command": " ".join(["python -m benchmarks.serving", *(arguments or sys.argv[1:])]),
        **{key: value for key, value in vars(given).items() if isinstance(value, int | str | list)},
    }
    given.results.mkdir(parents=True, exist_ok=True)
    told = {"about": about, "rows": {row.name: row.speeds for row in rows}, "ratios": found}
    (given.results / "serving.json").write_text(json.dumps(told, indent=1) + "\n")
    (given.results / "serving.md").write_text(markdown(rows, about, found))
    print(markdown(rows, about, found))
    is_met = [
        found[method][num] >= bar for method in METHODS for num, bar in BARS.items()
        if num in given.clients
    ]  # fmt: skip
    return 0 if all(is_met) else 1


if __name__ == "__main__":
    sys.exit(main())
