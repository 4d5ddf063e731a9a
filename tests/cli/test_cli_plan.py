"""``outrider plan``: answers, JSON, measured values, errors."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
import bench_cells

Run = Callable[..., Result]

PLAN = ("plan", "--target", "70B", "--draft", "1B", "--gpus", 8)


def test_the_answer_names_sharding_gamma_and_where_speculation_stops(run: Run) -> None:
    result = run(*PLAN, "--load", "5rps", env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    text = result.stdout
    assert "tensor parallelism 8), γ 4, the draft" in text.splitlines()[0]
    for part in ("Plain decoding at this load", "γ by batch size: 1–", "Assumptions", "→"):
        assert part in text
    assert "α is 0.7: an assumption" in text
    assert max(map(len, text.split("Assumptions")[0].splitlines()[4:])) <= 100


def test_json_has_every_option(run: Run) -> None:
    found = json.loads(run(*PLAN, "--load", "300rpm", "--alpha", 0.8, "--json").stdout)
    assert {each["tensor_parallel"] for each in found["options"]} == {2, 4, 8}
    assert found["best"] in found["options"]
    assert found["best"]["state"]["rows"] > 0
    assert found["assumptions"][0] == "α is 0.8: as given."
    light = json.loads(run(*PLAN, "--load", "5/s", "--alpha", 0.8, "--json").stdout)
    assert light["best"] == found["best"]  # 300 per minute


def test_measured_alpha_and_passes(run: Run, tmp_path: Path) -> None:
    cells = [bench_cells.cell("plain"), bench_cells.cell("fast", alpha=0.8, gamma=4)]
    (tmp_path / "cells.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in cells))
    models = {
        "target": {"pass_seconds": {"1": 0.02, "8": 0.024, "64": 0.2}},
        "draft": {"pass_seconds": {"1": 0.001, "64": 0.02}},
    }
    (tmp_path / "profile.json").write_text(json.dumps({"models": models}))
    given: tuple[Any, ...] = ("--target", "135M", "--draft", "20M", "--load", 0.05, "--gpus", 2)
    given += ("--alpha", tmp_path, "--passes", tmp_path / "profile.json")
    given += ("--gpu", "mine", "--memory", 16, "--bandwidth", 20, "--tflops", 1)
    result = run("plan", *given, "--link-bandwidth", 1, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["best"]["replicas"] == 2
    assert 0 < found["best"]["last_paying_batch"] < 64
    assert found["best"]["last_paying_load"] > 0
    assert found["assumptions"][0].startswith("α is 0.8")
    assert "measured times" in found["assumptions"][-1]
    assert (
        "Speculation stops paying beyond batch" in run("plan", *given, "--link-bandwidth", 1).stdout
    )


def test_a_simulated_hour_has_the_plan_and_plain_decoding(run: Run) -> None:
    given = ("--simulate", 0.02, "--swing", 0.3, "--mean-hours-to-failure", 0.05)
    result = run(*PLAN, "--load", "5rps", *given, env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.output
    assert "plain decoding" in result.stdout
    assert "failures restarted" in result.stdout
    simulated = json.loads(run(*PLAN, "--load", 5, *given, "--json").stdout)["simulated"]
    assert simulated["plan"]["arrived"] == simulated["plain decoding"]["arrived"]


def test_a_draft_that_does_not_pay_is_said_so(run: Run) -> None:
    result = run(*PLAN[:3], "--draft", "70B", "--gpus", 8, "--load", 1, "--alpha", 0.1)
    assert result.exit_code == 0, result.output
    assert "plain decoding" in result.stdout.splitlines()[0]
    assert "Speculation does not pay at this load: with the draft" in result.stdout
    assert "Speculation pays at no batch size" in result.stdout


def test_without_a_draft_decoding_is_plain(run: Run) -> None:
    result = run("plan", "--target", "8B", "--gpus", 1, "--load", 1)
    assert result.exit_code == 0, result.output
    assert "1 replica on 1 GPU each, plain decoding" in result.stdout
    assert "α" not in result.stdout


@pytest.mark.parametrize(
    ("arguments", "option"), [(("--load", 5), "--target"), (("--target", "8B"), "--load")]
)
def test_target_and_load_are_required(run: Run, arguments: tuple[Any, ...], option: str) -> None:
    result = run("plan", *arguments)
    assert result.exit_code == 2
    assert f"Missing option '{option}'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--load", "many"), "--load many: must be a rate above 0, such as 50rps"),
        (("--load", "0"), "--load 0: must be a rate above 0"),
        (("--load", 5, "--alpha", 1.5), "--alpha 1.5: must be a probability"),
        (("--load", 5, "--alpha", "nothing/"), "--alpha nothing/: must be a number"),
        (("--load", 5, "--gpu", "h1000"), "--gpu h1000: not a known GPU (a100, b200, h100"),
        (("--load", 5, "--bits", 0), "--bits 0: must be above 0"),
        (("--load", 5, "--gpus", 1), "--target 70B: does not fit"),
        (("--load", 5000), "8 × h100 serve at most"),
        (("--load", 5, "--max-per-token", 1e-6), "no number of GPUs is that fast"),
        (("--load", 5, "--flops-reached", 2), "--flops-reached 2: must be above 0"),
        (("--load", 5, "--prompt-tokens", 0), "--prompt-tokens 0: must be a whole number"),
        (("--load", 5, "--simulate", 1, "--swing", 2), "--swing 2.0: must be from 0 to 1"),
        (("--load", 5, "--passes", "none.json"), "--passes none.json: is not what"),
    ],
)
def test_bad_input_is_one_line_with_the_remedy(
    run: Run, arguments: tuple[Any, ...], message: str
) -> None:
    result = run(*PLAN, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
