"""The benchmark beside other processes: how they compute, the three ways, and the page."""

import os
from pathlib import Path

import pytest
import torch
from tiny_models import engine_of, tiny

from benchmarks import beside
from benchmarks.beside import Other
from outrider import Sampling


def test_the_other_process_has_its_session_and_niceness_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    popen = beside.subprocess.Popen

    def start(*arguments: object, **settings: object) -> object:
        started.append(popen(*arguments, **settings))  # type: ignore[call-overload]
        return started[-1]

    monkeypatch.setattr(beside.subprocess, "Popen", start)
    niceness = os.nice(0)
    with beside.running(Other(0.5, own_session=True, niceness=3)):
        assert os.getsid(started[0].pid) == started[0].pid
        assert os.getpriority(os.PRIO_PROCESS, started[0].pid) == min(niceness + 3, 19)
    with beside.running(Other(1, own_session=False)):
        assert os.getsid(started[1].pid) == os.getsid(0)
    assert all(process.returncode for process in started)
    with beside.running(Other(0)):
        assert len(started) == 2


def test_each_way_takes_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine looks for other processes in one of them."""
    engine = engine_of(tiny(), None, "plain")
    seen = []

    def speed(engine: object, seconds: float) -> float:
        seen.append((torch.get_num_threads(), engine._ignores_threads))  # type: ignore[attr-defined]
        return float(len(seen))

    monkeypatch.setattr(beside, "speed", speed)
    monkeypatch.setattr(beside, "OTHERS", (Other(0),))
    try:
        (row,) = beside.measure(engine, 2, 0.0, 2)
    finally:
        torch.set_num_threads(1)
    assert seen == [(2, False), (1, False), (2, True)] * 2
    assert list(row["speeds"]) == list(beside.WAYS)
    assert list(row["speeds"].values()) == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0]]


def test_the_speed_is_of_whole_outputs_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each output takes one second."""
    engine = engine_of(tiny(), None, "plain")
    clock = [0.0]

    def generate(prompts: list[str], sampling: Sampling) -> None:
        clock[0] += 1

    monkeypatch.setattr(engine, "generate", generate)
    monkeypatch.setattr(beside.time, "perf_counter", lambda: clock[0])
    assert beside.speed(engine, 2.5) == beside._TOKENS
    assert clock[0] == 4


def test_the_page_names_the_other_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = engine_of(tiny(), None, "plain")
    monkeypatch.setattr(beside.outrider, "load", lambda *_, **__: engine)
    monkeypatch.setattr(beside, "speed", lambda *_: 12.4)
    monkeypatch.setattr(beside, "OTHERS", (Other(0), Other(0.2, period=0.2, niceness=10)))
    beside.main(["--threads", "1", "--repeats", "2", "--out", str(tmp_path)])
    text = (tmp_path / "beside.md").read_text()
    assert "| no other process | 12, 12 | 12, 12 | 12, 12 |" in text
    assert "| its own session, niceness 10, 20% of every 0.2 s | 12, 12 |" in text
    assert text in capsys.readouterr().out
