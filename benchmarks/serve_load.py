"""Many concurrent streams against one server, with clients that leave at random.

    python -m benchmarks.serve_load                                   # 60 streams, a minute
    python -m benchmarks.serve_load --streams 200 --seconds 300       # the bar

Every client sends one request after another: greedy and sampled ones with a seed, by several
methods and lengths, with grammars, stop strings and several outputs. Before, each
request runs alone. Every stream must then have the same text, a part of which remains where the
client leaves; so the server runs with ``--exact``, since in bfloat16 rounding may turn a near tie
otherwise. At the end no row may be left, the memory must be flat, and SIGTERM must end the
server with status 0 while streams run. The load is one run of one server, so an interrupted run
starts again. Writes ``runs/serve/load.json``; fails if anything does.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.page import about
from benchmarks.serve_process import Server, serving
from outrider.lab.metadata import command_line

Body = dict[str, Any]
TEXT = "/v1/completions"


@dataclass(frozen=True)
class Case:
    """A request and what it must come to.

    Attributes:
        path: of the endpoint.
        body: without ``stream``.
        texts: of each output.
        reasons: why each output ends.
    """

    path: str
    body: Body
    texts: tuple[str, ...]
    reasons: tuple[str | None, ...]


@dataclass
class Report:
    """What happened.

    Attributes:
        done, left: streams that ran to their end, and those whose client left.
        refused: responses with status 429, after which the client tried again.
        failures: what went wrong, at most twenty.
        resident: MiB of the server over the seconds.
        seconds: of the whole run.
    """

    done: int = 0
    left: int = 0
    refused: int = 0
    failures: list[str] = field(default_factory=list)
    resident: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, what: str) -> None:
        if len(self.failures) < 20:
            self.failures.append(what)

    @property
    def slope(self) -> float:
        """Growth of the memory in the second half, in MiB per minute."""
        half = self.resident[len(self.resident) // 2 :]
        if len(half) < 3:
            return 0.0
        times, sizes = zip(*half, strict=True)
        return statistics.linear_regression(times, sizes).slope * 60


def bodies(num: int, seed: int = 0) -> list[tuple[str, Body]]:
    """Requests of all kinds."""
    dice = random.Random(seed)
    found: list[tuple[str, Body]] = []
    for number in range(num):
        words = " ".join(dice.choice("def return x y = + ( ) : if for print".split())
                         for _ in range(dice.randint(1, 40)))  # fmt: skip
        body: Body = {"max_tokens": dice.randint(1, 48), "seed": dice.randrange(2**40)}
        body["temperature"] = dice.choice([0, 0, 0.7, 1.0])
        kind = number % 10
        if kind in (0, 1, 2):
            body["ignore_eos"] = True
        if kind == 3:
            body["method"] = dice.choice(["plain", "suffix"])
        if kind == 4:
            body |= {"top_p": 0.9, "top_k": 40, "frequency_penalty": 0.4, "logprobs": 2}
        if kind == 5:
            body |= {"structured_outputs": {"regex": "[a-z]{3,9} = [0-9]{2,4}"}}
        if kind == 6:
            body |= {"n": 3}
        if kind == 7:
            body |= {"stop": ["\n", "x"]}
        if kind == 8:
            body |= {"num_speculative_tokens": dice.randint(0, 2)}
        found.append((TEXT, {"prompt": f"# {number}\n{words}", **body}))
    return found


async def alone(client: httpx.AsyncClient, path: str, body: Body) -> Case:
    """Runs a request by itself."""
    response = await client.post(path, json=body)
    response.raise_for_status()
    choices = response.json()["choices"]
    return Case(
        path, body, tuple(c["text"] for c in choices), tuple(c["finish_reason"] for c in choices)
    )


async def stream(
    client: httpx.AsyncClient, case: Case, leave_after: int | None, report: Report
) -> None:
    """Runs a request as a stream and compares it with what it must come to."""
    texts, reasons = [""] * len(case.texts), [None] * len(case.texts)
    chunks, is_over = 0, False
    async with client.stream("POST", case.path, json=case.body | {"stream": True}) as response:
        if response.status_code == 429:
            report.refused += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
            return
        if response.status_code != 200:
            report.fail(f"status {response.status_code}: {(await response.aread())[:300]!r}")
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_over = True
                break
            chunk = json.loads(line[6:])
            if "error" in chunk:
                report.fail(f"in a stream: {chunk['error']}")
                return
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
                reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
            chunks += 1
            if chunks == leave_after:
                break
    if is_over:
        report.done += 1
        if tuple(texts) != case.texts or tuple(reasons) != case.reasons:
            report.fail(f"{case.body}: {texts} {reasons}, alone {case.texts} {case.reasons}")
    elif leave_after is not None and chunks >= leave_after:
        report.left += 1
        for text, whole in zip(texts, case.texts, strict=True):
            if not whole.startswith(text):
                report.fail(f"{case.body}: began {text!r}, alone {whole!r}")
    else:
        report.fail(f"{case.body}: the stream ended without [DONE]")


async def worker(
    number: int, client: httpx.AsyncClient, cases: list[Case], until: float, report: Report
) -> None:
    """One client: request after request; every fifth is left at a random moment."""
    dice = random.Random(number)
    while time.monotonic() < until:
        leave = dice.randint(1, 8) if dice.random() < 0.2 else None
        try:
            await stream(client, dice.choice(cases), leave, report)
        except httpx.HTTPError as error:
            report.fail(f"{type(error).__name__}: {error}")


async def watch(server: Server, began: float, report: Report) -> None:
    """Notes the server's memory."""
    while True:
        report.resident.append((time.monotonic() - began, server.resident))
        await asyncio.sleep(1)


async def rows_left(client: httpx.AsyncClient) -> float:
    """Outputs that run or wait, once the server had the time for a round."""
    for _ in range(100):
        text = (await client.get("/metrics")).text
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        left = sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(names))
        if not left:
            return 0
        await asyncio.sleep(0.1)
    return left


async def run(server: Server, streams: int, seconds: float, num_cases: int) -> Report:
    """The whole test but SIGTERM."""
    report, began = Report(), time.monotonic()
    limits = httpx.Limits(max_connections=streams + 8, max_keepalive_connections=streams)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as client:
        cases = [await alone(client, path, body) for path, body in bodies(num_cases)]
        print(f"{len(cases)} requests ran alone in {time.monotonic() - began:.0f} s", flush=True)
        began = time.monotonic()
        watcher = asyncio.create_task(watch(server, began, report))
        until = began + seconds
        await asyncio.gather(
            *[worker(number, client, cases, until, report) for number in range(streams)]
        )
        watcher.cancel()
        report.seconds = time.monotonic() - began
        if left := await rows_left(client):
            report.fail(f"{left:g} outputs are left")
    return report


async def end(server: Server, streams: int, report: Report) -> None:
    """SIGTERM while streams run: each of them ends, and so does the server."""
    async with httpx.AsyncClient(base_url=server.url, timeout=None) as client:
        body = {"prompt": "def f(x):", "max_tokens": 64, "ignore_eos": True, "temperature": 0}
        case = await alone(client, TEXT, body)
        running = [asyncio.create_task(stream(client, case, None, report)) for _ in range(streams)]
        await asyncio.sleep(0.5)
        status = await asyncio.to_thread(server.terminate)
        for outcome in await asyncio.gather(*running, return_exceptions=True):
            if isinstance(outcome, httpx.ConnectError):
                report.refused += 1  # came after the signal
            elif isinstance(outcome, Exception):
                report.fail(f"while ending: {type(outcome).__name__}: {outcome}")
        if status != 0:
            report.fail(f"the server ended with status {status}")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--streams", type=int, default=60)
    options.add_argument("--seconds", type=float, default=60.0)
    options.add_argument("--cases", type=int, default=60, help="different requests")
    options.add_argument("--growth", type=float, default=2.0, help="most MiB per minute")
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--output", type=Path, default=Path("runs/serve/load.json"))
    options.add_argument(
        "serve", nargs="*", help="arguments of outrider serve, after --; by default --exact"
    )
    return options


def main(arguments: list[str] | None = None) -> int:
    """Runs the test; the exit status."""
    given = parser().parse_args(arguments)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    serve = [*(given.serve or ["--exact"]), "--max-queue", str(4 * given.streams)]
    with serving(serve, given.output.with_suffix(".log"), given.threads) as server:
        report = asyncio.run(run(server, given.streams, given.seconds, given.cases))
        asyncio.run(end(server, min(given.streams, 20), report))
        errors = [each for each in server.logged() if each["level"] == "error"]
        for each in errors[:5]:
            report.fail(f"in the log: {each}")
    if report.slope > given.growth:
        report.fail(f"the memory grows by {report.slope:.1f} MiB per minute")
    where = about(command_line(), threads=given.threads)
    told = {"about": where, **asdict(report), "slope": report.slope, "streams": given.streams}
    given.output.write_text(json.dumps(told, indent=1))
    print(
        f"{report.done} streams ended, {report.left} were left, {report.refused} refused, in "
        f"{report.seconds:.0f} s; memory {report.slope:+.2f} MiB per minute; "
        f"{len(report.failures)} failures"
    )
    for failure in report.failures:
        print(f"  {failure[:600]}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
