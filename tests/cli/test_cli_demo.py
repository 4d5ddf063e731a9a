"""``outrider demo`` and ``outrider methods``, and the comparison of greedy outputs."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import save_tokenizer
from tiny_models import COMPILED, save_compiled
from typer.testing import Result

from outrider import METHODS, Engine, Sampling, load
from outrider.cli.compare import against_plain, first_difference
from outrider.cli.demo import PROMPTS
from outrider.cli.engines import plain_engine
from outrider.engine import plain, warming
from outrider.runtime.executors.prepare import prepare

Run = Callable[..., Result]


def test_methods_lists_all_with_paper_and_distribution(run: Run) -> None:
    result = run("methods")
    assert result.exit_code == 0
    for name in (*METHODS, "Leviathan", "lossless", "draft model"):
        assert name in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    rows = json.loads(run("methods", "--json").stdout)
    assert [row["name"] for row in rows] == list(METHODS)
    assert all(row["paper"] and isinstance(row["lossless"], bool) for row in rows)


def test_demo_shows_trace_table_and_greedy_comparison(run: Run, pair: tuple[Path, Path]) -> None:
    target, draft = pair
    models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
    result = run("demo", *models, "--compile", "off", "--max-new-tokens", 8)
    assert (result.exit_code, result.stderr) == (0, "")
    for part in ("[~", "trace: ", "plain", "speed-up", "acceptance", "α", "temperature 0.8"):
        assert part in result.stdout
    assert result.stdout.count("identical, 8 tokens") == len(PROMPTS)
    own = [line for line in result.stdout.splitlines() if "[~" not in line]
    assert max(map(len, own)) <= 80


def test_a_demo_that_would_compile_for_too_long_runs_eagerly(
    run: Run, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.cli.demo._MOST_COMPILING", -1.0)
    target, draft = pair
    models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
    result = run("demo", *models, "--max-new-tokens", 8)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: the models are not compiled after")
    assert result.stdout.count("identical, 8 tokens") == len(PROMPTS)


def test_demo_takes_bad_input_on_one_line(run: Run) -> None:
    result = run("demo", "--num-speculative-tokens", 0)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --num-speculative-tokens 0: ")


def test_plain_decoding_has_programs_where_the_engine_has_them(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A comparison with plain decoding whose rule runs eagerly would favour speculation."""
    warmed: list[Engine] = []
    monkeypatch.setattr(plain, "warm_up", lambda each, _: warmed.append(each))
    engine = load(*pair, dtype="float32", device="cpu")
    plain_engine(engine)
    assert warmed == []
    prepare(engine.target, "auto", own=True)
    compiled = plain_engine(engine)
    assert warmed == [compiled]
    assert warming.programs_of(compiled)[-1].what == "rule Coupled without drafts"


def test_first_differences_are_near_ties_or_mistakes(pair: tuple[Path, Path]) -> None:
    engine = load(*pair, dtype="float32", device="cpu")
    plain = plain_engine(engine).generate(PROMPTS[0], Sampling(temperature=0, max_new_tokens=6))
    assert first_difference(engine, plain, plain) is None
    *first, last = plain.token_ids
    other = replace(plain, token_ids=(*first, (last + 1) % 256))
    difference = first_difference(engine, plain, other)
    assert difference is not None
    assert difference.gap is not None
    assert (difference.position, difference.near_tie) == (5, False)
    assert difference.gap > 1e-3
    assert "NOT a near-tie" in str(difference)
    comparison = against_plain(engine, other, plain, greedy=True)
    assert comparison.failed
    assert comparison.as_dict()["identical"] is False
    short = first_difference(engine, plain, replace(plain, token_ids=tuple(first)))
    assert short is not None
    assert "one ends" in str(short)
    same = replace(plain, token_ids=(*first, last, last))
    assert against_plain(engine, same, plain, greedy=False).first_difference is None


def test_a_wrong_greedy_output_fails_the_command(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(engine: object, result: object, plain: object, greedy: bool) -> object:
        spoilt = replace(plain, token_ids=tuple((t + 1) % 256 for t in plain.token_ids))  # type: ignore[type-var, attr-defined]
        return against_plain(engine, result, spoilt, greedy)  # type: ignore[arg-type]

    monkeypatch.setattr("outrider.cli.generate.against_plain", wrong)
    result = generate("x", "--compare", "--temperature", 0)
    assert result.exit_code == 1
    assert "differ from token 0" in result.stderr
    assert "NOT a near-tie" in result.stderr


@pytest.mark.slow
def test_a_compiled_demo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With models of one layer and the same shape, which share programs, and short drafts, since
    each drafted token makes their programs longer; however long it takes to compile them."""
    monkeypatch.setattr("outrider.cli.demo._MOST_COMPILING", 1e9)
    target, draft = (save_compiled(tmp_path / str(seed), seed) for seed in (0, 1))
    assert save_tokenizer(target) == save_tokenizer(draft) == COMPILED["vocab_size"]
    models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
    result = run("demo", *models, "--max-new-tokens", 24, "--num-speculative-tokens", 2)
    assert result.exit_code == 0, result.output
    assert "not compiled" not in result.stderr
    assert "NOT a near-tie" not in result.stdout
    assert result.stdout.count("identical, ") == len(PROMPTS)
    assert "speed-up" in result.stdout


@pytest.mark.slow
def test_demo_on_the_embedded_pair(run: Run) -> None:
    result = run("demo", "--compile", "off", "--max-new-tokens", 24)
    assert result.exit_code == 0, result.output
    assert "NOT a near-tie" not in result.stdout
    assert "speed-up" in result.stdout
