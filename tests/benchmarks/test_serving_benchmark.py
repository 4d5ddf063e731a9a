"""The table of the servers' benchmark, and its workers."""

import json
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import uvicorn
from tiny_servers import tiny_engine

from benchmarks.peer_workers.client import Client, PeerError
from benchmarks.peer_workers.protocol import Batch
from benchmarks.serving import Measure, Row, Speeds, gains, page, ratios, run
from outrider.serve.app import create_app

METHODS = "plain", "speculative"
GIVEN = Namespace(clients=[1, 8], requests=2, repeats=3, max_new_tokens=4)
PROMPTS = [[1, 2], [3]] * 8


def rows(measure: Callable[[float], Measure]) -> list[Row]:
    """Engines that take a second, and servers that take a little longer."""
    return [
        Row(name + method, measure(seconds))
        for method in METHODS
        for name, seconds in (("engine, ", 1.0), ("outrider serve, ", 1.02))
    ]


def shared(seconds: float) -> Measure:
    return lambda num, prompts, num_tokens: Batch(seconds / num + 0.5, 0.5)


def measured(path: Path, settings: dict[str, Any]) -> dict[str, dict[int, list[float]]]:
    speeds = Speeds(path, settings)
    run(rows(shared), PROMPTS, GIVEN, speeds)
    return {row.name: {num: speeds.of(row.name, num, 3) for num in (1, 8)} for row in rows(shared)}


def test_ratios_and_bars(tmp_path: Path) -> None:
    table = measured(tmp_path / "kept.json", {})
    assert table["engine, plain"][1] == [8.0] * 3  # two requests of four tokens in a second
    found = ratios(table, METHODS, GIVEN.clients)
    assert all(abs(found[method][num] - 1 / 1.02) < 1e-9 for method in METHODS for num in (1, 8))
    where = {
        "date": "2026-11-22", "hardware": "a machine", "torch": "2", "load": 0.0, "command": "x",
        "threads": 1, "pair": "smollm2", "dtype": "bfloat16", "compile": "off",
        "max_new_tokens": 4, "repeats": 3, "clients": [1, 8],
        "missing": ["a peer: not installed"],
    }  # fmt: skip
    shares = {row: {1: 0.0, 8: 0.0} for row in table}
    drafts = gains(table, METHODS, GIVEN.clients)
    report = {"about": where, "ratios": found, "gains": drafts, "clients": shares}
    text = page(report, table)
    assert "| server with drafts over server without, 8 clients: ≥ 0.97 | 1.000 | yes |" in text
    assert "SmolLM2-135M-Instruct in bfloat16" in text
    assert "one processor" not in text
    assert "|  | 1 client | 8 clients |" in text
    assert "a peer: not installed." in text
    assert "| server over engine, speculative, 8 clients: ≥ 0.9 | 0.980 | yes |" in text
    found["plain"][1] = 0.9
    shares["outrider serve, plain"] = {1: 0.01, 8: 0.04}
    drafts["speculative"][8] = 0.66
    text = page(report, table)
    assert "| server with drafts over server without, 8 clients: ≥ 0.97 | 0.660 | no |" in text
    assert "it comes to 0.5% at 1, 2.0% at 8." in text
    assert "| server over engine, plain, 1 clients: ≥ 0.97 | 0.900 | no |" in text


def test_an_interrupted_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    path, count = tmp_path / "kept.json", 0

    def interrupted(seconds: float) -> Measure:
        def measure(num: int, prompts: Any, num_tokens: int) -> Batch:
            nonlocal count
            count += 1
            if count == 13:  # of 8 to warm up and 24 measurements
                raise KeyboardInterrupt
            return Batch(seconds)

        return measure

    with pytest.raises(KeyboardInterrupt):
        run(rows(interrupted), PROMPTS, GIVEN, Speeds(path, {"repeats": 3}))
    assert count == 13
    run(rows(interrupted), PROMPTS, GIVEN, Speeds(path, {"repeats": 3}))
    assert count == 13 + 8 + 24 - 4  # four had been measured
    assert Speeds(path, {"repeats": 4}).get("engine, plain", 1, 0) is None


def test_clients_in_a_process_of_their_own(tmp_path: Path) -> None:
    server = uvicorn.Server(
        uvicorn.Config(create_app(tiny_engine()), port=0, log_config=None, lifespan="on")
    )
    thread = Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            thread.join(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        command = [sys.executable, "-m", "benchmarks.peer_workers.http_clients"]
        url = f"http://127.0.0.1:{port}"
        with Client([*command, url, "{}"], tmp_path / "log") as worker:
            assert worker.decode_all([[1, 2], [3], [4]], 2, 6).seconds > 0
            with pytest.raises(PeerError, match="out of range"):
                worker.decode_all([[999]], 1, 6)
        more = json.dumps({"ignore_eos": False, "logit_bias": {"0": 100}})
        early = pytest.raises(PeerError, match="an output ended early")
        with Client([*command, url, more], tmp_path / "log") as worker, early:
            worker.decode_all([[1, 2]], 1, 6)
    finally:
        server.should_exit = True
        thread.join()
