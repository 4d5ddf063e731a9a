"""``outrider certify``: the table, the verdict, the exit code.

A correct pair fails a run with probability below 1e-3; seeds are fixed.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.cli.certify import PROMPTS, read_prompts

Run = Callable[..., Result]
SMALL = ("--positions", 32, "--samples", 48, "--length", 3, "--num-speculative-tokens", 3)
MUTANTS = "outrider.testing.mutants"


@pytest.fixture
def certify(pair: tuple[Path, Path], run: Run, tmp_path: Path) -> Run:
    """The command with the tiny pair, one short prompt, and few samples."""
    target, draft = pair
    file = tmp_path / "prompts.txt"
    file.write_text("def f3(x):\n\n")
    models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")

    def call(*arguments: object) -> Result:
        return run("certify", "-f", file, *models, *SMALL, *arguments)

    return call


def test_table_and_verdict_fit_a_terminal(certify: Run) -> None:
    result = certify("--temperature", 0.8, "--top-k", 40)
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    for part in ("states", "positions", "rounds", "drafts", "tokens", "outputs", "pass"):
        assert part in result.stdout
    flat = " ".join(result.stdout.split())
    assert "LOSSLESS as far as tested: TV per position ≤ " in flat
    assert "Rejection in method speculative, γ 3, temperature 0.8, float32 on cpu" in flat


def test_json_is_one_document(certify: Run) -> None:
    result = certify("--json", "--draft-confidence", 0.1)
    document = json.loads(result.stdout)
    assert document["passed"] is True
    assert document["method"] == "speculative"
    assert document["dtype"] == "float32"
    assert {check["name"]: check["passed"] for check in document["checks"]}["positions"] is True


@pytest.mark.parametrize("mutant", ["ResidualFromTarget", "BonusOmitted", "SortedByRatio"])
def test_a_mutant_ends_with_code_1(certify: Run, mutant: str) -> None:
    result = certify("--verifier", f"{MUTANTS}:{mutant}", "--samples", 0)
    assert result.exit_code == 1, result.output
    assert f"NOT LOSSLESS: {mutant} fails" in " ".join(result.stdout.split())


def test_the_users_own_rules_and_drafters(
    certify: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rules_7.py").write_text(
        "from outrider.drafters import ModelDrafter as mine\n"
        "from outrider.verifiers import Lenience, Rejection as right\n"
        "mild = Lenience(0.9)\n"
    )
    monkeypatch.chdir(tmp_path)
    result = certify("--verifier", "my_rules_7:mild", "--samples", 0)
    assert result.exit_code == 0, result.output
    assert "AS CLAIMED" in result.stdout
    result = certify("--verifier", "my_rules_7:right", "--drafter", "my_rules_7:mine")
    assert result.exit_code == 0, result.output


def test_temperature_0(certify: Run) -> None:
    result = certify("--temperature", 0)
    assert result.exit_code == 0, result.output
    assert "all 48 tokens are the target's argmax" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--verifier", "nonsense"], "write MODULE:NAME"),
        (["--verifier", "no_such_module:X"], "cannot import 'no_such_module'"),
        (["--verifier", f"{MUTANTS}:Nothing"], "has no 'Nothing'"),
        (["--verifier", "json:dumps"], "no verification rule"),
        (["--verifier", f"{MUTANTS}:WithReplacementAssumed"], "cannot verify 'iid'"),
        (["--verifier", f"{MUTANTS}:TopKAsDraws"], "called without arguments"),
        (["--length", 256], "do not fit into the context of 256"),
        (["--method", "nothing"], "unknown method"),
        (["-f", "nowhere.txt"], "No such file"),
    ],
)
def test_bad_input_is_one_line(certify: Run, arguments: list[object], part: str) -> None:
    result = certify(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert part in line


def test_prompts_from_lines_and_from_json_lines(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_text("first\n\n  second {x}\n")
    assert read_prompts(lines) == ["first", "  second {x}"]
    documents = tmp_path / "b.jsonl"
    documents.write_text('{"prompt": "one\\ntwo"}\n\n{"id": 2, "prompt": "three"}\n')
    assert read_prompts(documents) == ["one\ntwo", "three"]
    documents.write_text('{"prompt": "one"}\n{"text": "two"}\n')
    with pytest.raises(ValueError, match="entry 2: no JSON object with a 'prompt'"):
        read_prompts(documents)


def test_the_embedded_pair(run: Run) -> None:
    """With the method's own rule, and with a wrong one in its place."""
    small = ("--positions", 40, "--num-speculative-tokens", 3, "--samples", 0, "--dtype", "float32")
    right = run("certify", *small)
    assert right.exit_code == 0, right.output
    wrong = run("certify", *small, "--verifier", f"{MUTANTS}:ResidualFromTarget")
    assert wrong.exit_code == 1, wrong.output
    assert "fails positions, rounds" in " ".join(wrong.stdout.split())
    assert len(PROMPTS) == 3
