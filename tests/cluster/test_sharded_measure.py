"""The cost model of a sharded target's rounds, and the command that measures it."""

import json
from pathlib import Path
from typing import Any

import pytest
from rank_processes import RankProcesses
from test_sharded import models, ranks  # noqa: F401 (fixtures)
from typer.testing import CliRunner

from outrider.cluster.sharded.measure import Link, PassTime


def test_the_fit_recovers_latency_and_bandwidth() -> None:
    link = Link.fit({n: 5e-5 + n / 2e9 for n in (1000, 50_000, 4_000_000)})
    assert link.latency == pytest.approx(5e-5)
    assert link.bandwidth == pytest.approx(2e9)
    assert link.seconds(2_000_000) == pytest.approx(5e-5 + 1e-3)


def test_the_fit_has_no_negative_term() -> None:
    steep = Link.fit({1000: 1e-6, 2000: 3e-6})
    assert steep.latency == 0
    falling = Link.fit({1000: 3e-6, 2000: 1e-6})
    assert falling.bandwidth > 1e12


def test_a_pass_is_its_local_work_and_its_exchanges() -> None:
    link = Link(1e-3, 1e6)
    assert PassTime(0.5, 0.0, (1000, 2000)).predicted(link) == pytest.approx(0.5 + 2e-3 + 3e-3)


def command(*arguments: str) -> tuple[int, str, str]:
    """What a rank does: a command of the command line."""
    from outrider.cli.app import app

    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stdout, result.stderr


def test_the_command_measures_both_placements(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    pair = ["--target", str(models / "llama"), "--draft", str(models / "draft")]
    settings = ["--dtype", "float32", "--repeats", "2", "--max-new-tokens", "8", "--json"]
    first, second = ranks.run(command, "sharding", *pair, *settings, size=2)
    assert first[0] == second[0] == 0, first
    assert second[1] == ""
    found: dict[str, Any] = json.loads(first[1])
    assert found["size"] == 2
    assert set(found["rounds"]) == {"replicated", "rank0"}
    target = found["target"]
    assert target["num_exchanges"] == 4, "two per layer"
    assert target["exchanged"] == 4 * 6 * 32 * 4, "γ + 1 tokens of 32 numbers each"
    assert 0 < target["local"] < target["predicted"]


@pytest.mark.parametrize("placement", ["replicated", "rank0"])
def test_generate_continues_a_prompt_on_rank_0(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
    placement: str,
) -> None:
    arguments = ["generate", "def f(x):", "--target", str(models / "llama")]
    arguments += ["--draft", str(models / "draft"), "--dtype", "float64", "--temperature", "0"]
    arguments += ["--max-new-tokens", "9"]
    one = command(*arguments)
    assert one[0] == 0
    first, second = ranks.run(command, *arguments, "--draft-placement", placement, size=2)
    assert first[:2] == one[:2]
    assert second[:2] == (0, "")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tensor-parallel", "4"], "--tensor-parallel 4 needs 4 processes, and 2 were started"),
        (["--compare"], "--compare needs one process"),
        (["--target", "gpt2"], "has no tensor-parallel plan"),
    ],
)
def test_bad_options_are_one_line(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
    options: list[str],
    message: str,
) -> None:
    options = [str(models / each) if each == "gpt2" else each for each in options]
    pair = ["--target", str(models / "llama"), "--draft", str(models / "draft")]
    code, output, errors = ranks.run(command, "generate", "x", *pair, *options, size=2)[0]
    assert (code, output) == (2, "")
    assert message in errors


@pytest.mark.parametrize(
    "arguments", [["generate", "x", "--draft-placement", "rank0"], ["sharding"]]
)
def test_one_process_is_too_few(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    code, _, errors = command(*arguments)
    assert code == 2
    assert "needs several processes: start torchrun" in errors


def test_the_measurement_takes_no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """It measures both; a draft model that is on rank 0 alone could not stand for the other."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    code, _, errors = command("sharding", "--draft-placement", "rank0")
    assert code == 2
    assert "measures both placements: leave out --draft-placement rank0" in errors


def test_torchrun_cannot_start_other_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    code, _, errors = command("methods")
    assert code == 2
    assert "not outrider methods" in errors
