"""``outrider bench``: its tables, its files, plans, resumption, errors."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from outrider.lab.bench import CellResult, read_cells
from outrider.lab.bench import run as running
from outrider.lab.cell_view import view

Run = Callable[..., Result]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"def f{i}(x):\n", "task": "ab"[i % 2]} for i in range(4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def bench(pair: tuple[Path, Path], run: Run, prompts: Path, tmp_path: Path) -> Run:
    """The command with the tiny pair, and small numbers of everything."""

    def call(*arguments: object, **more: Any) -> Result:
        target, draft = pair
        models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
        size = ("--max-new-tokens", 4, "--repeats", 2, "--max-repeats", 2, "--warmup", 0)
        files = ("--data", prompts, "-o", tmp_path / "out")
        return run("bench", *models, *size, *files, *arguments, **more)

    return call


def cells(tmp_path: Path) -> list[CellResult]:
    return read_cells(tmp_path / "out")


def give_times(file: Path) -> None:
    """Replaces the measured times of cells, so that no busy machine decides what a report shows:
    a prefill of 10 ms, and a second of target passes in each output."""
    lines = []
    for each in map(json.loads, file.read_text().splitlines()):
        each["speed"]["first_token_seconds"]["mean"], each["speed"]["round_seconds"] = 0.02, 0.01
        for repeat in each["repeats"]:
            for request in (one for batch in repeat["batches"] for one in batch["requests"]):
                drafts = 0.1 * (request["stats"]["drafted"] > 0)
                request["stats"] |= {"draft_seconds": drafts, "target_seconds": 1.0}
        lines.append(json.dumps(each) + "\n")
    file.write_text("".join(lines))


def test_the_report_reads_what_the_benchmark_wrote(bench: Run, run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    result = bench(
        "--method", "speculative", "--method", "mentored:budget=0.5", "--gamma", 2, "--gamma", 3,
        "--temperature", 0.8, "--metric", "perplexity", "--meter", "energy-model",
        "--report", page,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert result.stderr.endswith(f"wrote {page}\n")
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "mentored:budget=0.5" in text
    assert 'class="lossy"' in text
    assert 'class="accepted"' in text or 'class="correction"' in text
    lossy = {view(each).lossless for each in map(CellResult.as_dict, cells(tmp_path))}
    assert lossy == {True, False}

    give_times(tmp_path / "out" / "cells.jsonl")
    assert run("report", tmp_path / "out", "-o", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    for title in (
        "Speed-up over plain decoding",
        "Acceptance by position",
        "Quality against speed: perplexity macro",
        "Latency",
        "Energy against speed: energy-model (estimate)",
        "Speed-up by draft length",
        "Measured against predicted speed-up",
    ):
        assert f"<h3>{title}</h3>" in text


def test_tables_fit_80_columns_and_mark_lossy_methods(bench: Run, tmp_path: Path) -> None:
    long = "mentored:budget=0.25,divergence=tv,allow_off_support=true"
    result = bench(
        "--method", "speculative", "--method", long, "--gamma", 2, "--gamma", 3,
        "--temperature", 0.8, "--batch-size", 1, "--batch-size", 2,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert "prompts (4 prompts), temperature 0.8, batch 2" in result.stdout
    assert result.stdout.count("plain") == 2
    one_line = " ".join(result.stdout.split())
    assert "(lossy)" in one_line
    assert "lossy: the output does not have the target's distribution" in one_line
    assert "wrote" in result.stderr
    results = cells(tmp_path)
    assert len(results) == 2 * (1 + 4)
    assert {each.lossless for each in results if each.cell.method[0] == "m"} == {False}


def test_a_divergence_that_cannot_be_measured_is_no_zero(bench: Run) -> None:
    """MJSD accepts whole paths: no token has a distribution of its own."""
    result = bench(
        "--method", "mjsd:beams=2", "--method", "mentored:budget=0.5", "--gamma", 2,
        "--temperature", 0.8, "--metric", "divergence",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if "divergence" in line]
    values = [row[2] for row in rows if row[:2] == ["divergence", "tv"]]
    assert values[0] == "0"
    assert float(values[1].replace("–", "nan")) != 0
    assert "–" in values[1:]
    assert sum(value not in ("0", "–") for value in values) == 1


def test_tables_in_markdown_need_no_matplotlib(
    bench: Run, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench().exit_code == 0
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = tmp_path / "report.md"
    assert run("report", tmp_path / "out", "-o", page).exit_code == 0
    assert "## Environment" in page.read_text(encoding="utf-8")
    refused = run("report", tmp_path / "out", "-o", tmp_path / "report.html")
    assert refused.exit_code == 2
    assert "needs matplotlib" in refused.stderr


def test_json_lines(bench: Run, tmp_path: Path) -> None:
    result = bench("--json")
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [each["cell"]["method"] for each in documents] == ["plain", "speculative"]
    assert documents[1]["speedup"]["ratio"] > 0
    assert set(documents[1]["environment"]) >= {"hardware", "versions", "commit", "command", "plan"}
    written = (tmp_path / "out" / "cells.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in written] == documents


def test_options_replace_the_plans_values(bench: Run, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        'methods = ["block", { name = "speculative", gamma = 1, label = "one" }]\n'
        "gammas = [2]\nseed = 5\nwarmup = 3\nmax_new_tokens = 99\n"
        'data = ["./other.txt"]\n'
    )
    assert bench("--plan", plan, "--gamma", 3, "--seed", 0).exit_code == 0
    found = [(each.cell.title, each.cell.gamma) for each in cells(tmp_path)]
    assert found == [("plain", None), ("block", 3), ("one", 1)]
    made = cells(tmp_path)[0].environment["plan"]
    assert (made["seed"], made["warmup"], made["max_new_tokens"]) == (0, 0, 4)


def test_a_plan_alone(run: Run, pair: tuple[Path, Path], prompts: Path, tmp_path: Path) -> None:
    target, draft = pair
    plan = tmp_path / "plan.toml"
    plan.write_text(
        f'target = "{target}"\ndrafts = ["{draft}"]\nmethods = "speculative"\n'
        'data = [{ source = "./prompts.jsonl", tasks = ["b"], limit = 1 }]\n'
        'dtype = "float32"\ndevice = "cpu"\nrepeats = 1\nmax_repeats = 1\nmax_new_tokens = 2\n'
    )
    result = run("bench", "--plan", plan, "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert [each.data["examples"] for each in cells(tmp_path)] == [1, 1]


def test_data_options(bench: Run, tmp_path: Path) -> None:
    assert bench("--limit", 1, "--task", "b", "--prompts", "text").exit_code == 0
    assert cells(tmp_path)[0].data["examples"] == 1


def test_ctrl_c_keeps_finished_cells_and_the_same_command_goes_on(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = running.run_examples, 0

    def run_examples(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 4:  # one warm-up and one repeat of each method come before
            raise KeyboardInterrupt
        yield from real(*arguments)

    monkeypatch.setattr(running, "run_examples", run_examples)
    result = bench()
    assert result.exit_code == 130
    assert "interrupted; the same command goes on from" in result.stderr
    assert len(cells(tmp_path)) == 1
    monkeypatch.setattr(running, "run_examples", real)
    assert bench().exit_code == 0
    assert [len(each.repeats) for each in cells(tmp_path)] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--method", "speculativ"), "did you mean 'speculative'"),
        (("--method", "mentored:budgets=1"), "did you mean 'budget'"),
        (("--gamma", 65), "--gamma 65: must be a whole number from 1 to 64"),
        (("--temperature", -1), "--temperature -1.0"),
        (("--repeats", 0), "--repeats 0: must be a whole number from 1"),
        (("--data", "none.jsonl"), "cannot read data file 'none.jsonl'"),
        (("--task", "c"), "no such task; it has a, b"),
        (("--prompts", "talk"), "prompts='talk': must be one of auto, chat, text"),
        (("--prompts", "chat"), "has no chat template"),
        (("--metric", "none"), "unknown metric 'none'"),
        (("--report", "no/such/report.html"), "there is no folder no/such"),
        (("--report", "."), "is a folder; pass the name of a file"),
        (("--plan", "none.toml"), "cannot read plan 'none.toml'"),
        (("--method", "mjgd", "--temperature", 1), "is defined at temperature 0 only"),
    ],
)
def test_bad_input(bench: Run, arguments: tuple[object, ...], message: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_target_of_ones_own_needs_prompts(run: Run, pair: tuple[Path, Path]) -> None:
    result = run("bench", "--target", pair[0], "--method", "suffix")
    assert result.exit_code == 2
    assert "no prompts: pass --data FILE" in result.stderr


def test_a_folder_that_cannot_be_written(bench: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = bench("-o", tmp_path / "file" / "out")
    assert result.exit_code == 2
    assert "cannot write to --output" in result.stderr


def test_metrics_and_energy_are_shown(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine without counters: the estimate is marked as one."""
    from outrider.lab.energy import meters

    monkeypatch.setattr(meters, "_KINDS", ())
    result = bench("--metric", "perplexity", "--metric", "distinct", "--energy")
    assert result.exit_code == 0, result.output
    one_line = " ".join(result.stdout.split())
    assert "perplexity macro" in one_line
    assert "perplexity nats_per_token +0 (0 to 0) distinct-1" in one_line
    assert "tokens 32" not in one_line
    assert "paired bootstrap" in one_line
    assert "joules/token (estimate)" in one_line
    assert max(map(len, result.stdout.splitlines())) <= 80
    for cell in cells(tmp_path):
        assert cell.metrics["perplexity"]["micro"] > 1
        assert all(repeat.readings["energy"]["joules"] > 0 for repeat in cell.repeats)


def test_metrics_without_values_are_not_compared(bench: Run) -> None:
    """Outputs of two tokens have no distinct-3."""
    lines = bench("--metric", "distinct", "--max-new-tokens", 2).stdout.splitlines()
    rows = [line.split() for line in lines if line.startswith("  distinct")]
    assert [row[0] for row in rows] == ["distinct-1", "distinct-2", "distinct-3"] * 2
    assert rows[4][2:] == ["+0", "(0", "to", "0)"]
    assert rows[5][1:] == ["–"]


def test_counters_that_vanish_lose_no_cells(
    bench: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.lab.energy import meters
    from outrider.lab.energy.errors import CounterError

    class Vanishing:
        """Answers at the ends of the first run, and never again."""

        name, longest_interval = "rapl", None

        def __init__(self) -> None:
            self.reads = 0

        def read(self) -> dict[str, float]:
            self.reads += 1
            if self.reads > 2:
                raise CounterError("counter 0 is gone")
            return {"package-0": 1.0 * self.reads}

    monkeypatch.setattr(meters, "_KINDS", (Vanishing,))
    monkeypatch.setattr(meters, "idle_watts", lambda counters: None)
    result = bench("--energy")
    assert result.exit_code == 0, result.output
    one_line = " ".join(result.stdout.split())
    assert "counter 0 is gone" in one_line
    found = cells(tmp_path)
    assert len(found) == 2
    assert all(cell.speed["tokens_per_second"]["mean"] > 0 for cell in found)


def test_generated_code_needs_a_flag(bench: Run, prompts: Path, tmp_path: Path) -> None:
    result = bench("--metric", "pass@k")
    assert result.exit_code == 2
    assert "--run-generated-code" in " ".join(result.stderr.split())
    row = {
        "task_id": "t/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n",
        "test": "def check(f):\n    assert f() == 1\n", "entry_point": "f",
    }  # fmt: skip
    prompts.write_text(json.dumps(row) + "\n")
    result = bench("--metric", "pass@k", "--run-generated-code")
    assert result.exit_code == 0, result.output
    for cell in cells(tmp_path):
        assert cell.metrics["pass@k"]["pass@1"] == 0
