"""Runs of plans on tiny models: what is measured, resumed, repeated and refused."""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_bench import ticking, tiny_data, tiny_pair, tiny_plan
from tiny_models import tiny_module

from outrider import Sampling
from outrider.core.errors import InvalidParameterError, NonFiniteLogitsError, PromptError
from outrider.engine import Engine
from outrider.lab.bench import (
    METERS,
    METRICS,
    BenchPlan,
    CellResult,
    Progress,
    meter,
    metric,
    read_cells,
    run_bench,
)
from outrider.lab.bench import measure as measuring
from outrider.lab.bench import run as running
from outrider.lab.data import DataSet, Example, Turn
from outrider.lab.quality.errors import MissingReferenceError
from outrider.lab.sandbox import allow_generated_code
from outrider.runtime import HFModel


def bench(plan: BenchPlan, **more: Any) -> list[CellResult]:
    """The results of a plan on the tiny pair, by a clock that counts its calls."""
    data = more.pop("data", {"memory": tiny_data()})
    return run_bench(plan, models=tiny_pair(), data=data, **({"clock": ticking()} | more))


def as_json(result: CellResult) -> Any:
    return json.loads(json.dumps(result.as_dict()))


def outputs(result: CellResult) -> list[list[tuple[int, ...]]]:
    return [[request.token_ids for request in repeat.requests] for repeat in result.repeats]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int, int]]:
    """Method, temperature, seed and batch size of each run over the data set that is timed."""
    found: list[tuple[str, float, int, int]] = []
    real = running.run_examples

    def run_examples(
        engine: Engine, examples: Any, sampling: Sampling, size: int, *more: Any
    ) -> Any:
        assert sampling.temperature is not None
        found.append((engine.method.name, sampling.temperature, sampling.seed, size))
        yield from real(engine, examples, sampling, size, *more)

    monkeypatch.setattr(running, "run_examples", run_examples)
    return found


# ------------------------------------------------------------------------------- measurements


def test_every_cell_is_measured_and_the_baseline_is_added() -> None:
    plan = tiny_plan(gammas=[1, 3], temperatures=[0, 0.8], batch_sizes=[1, 2])
    results = bench(plan)
    assert len(results) == 2 * 2 * (1 + 2)
    for result in results:
        cell = result.cell
        assert (cell.method, cell.gamma) in {
            ("plain", None),
            ("speculative", 1),
            ("speculative", 3),
        }
        assert cell.is_baseline == (cell.method == "plain") == (result.speedup is None)
        assert result.lossless
        assert [len(repeat.batches) for repeat in result.repeats] == [4 - cell.batch_size] * 2
        assert [repeat.seed for repeat in result.repeats] == [0, 1]
        assert result.speed["emitted"] == 2 * 3 * 8
        assert result.environment["plan"]["gammas"] == (1, 3)
        assert result.environment["versions"]["outrider"]
        assert result.data["sha256"] == "hash of 3"
    assert len({result.key for result in results}) == len(results)


def test_cells_that_cannot_differ_are_run_once() -> None:
    """A data set under two names has one key, so its cells share their repeats."""
    data = {name: tiny_data(3, name) for name in ("one", "two")}
    seen: list[Progress] = []
    results = bench(tiny_plan(data=["one", "two"]), data=data, on_progress=seen.append)
    assert [each.cell.data for each in results] == ["one", "one", "two", "two"]
    assert results[0].repeats == results[2].repeats
    assert (seen[-1].done, seen[-1].total) == (4, 4)


def test_outputs_are_those_of_the_engine() -> None:
    """Greedy outputs of both methods are equal, and sampled ones have the seed of their repeat."""
    plan = tiny_plan(temperatures=[0, 1], batch_sizes=[1, 3])
    by_cell = {(r.cell.method, r.cell.temperature, r.cell.batch_size): r for r in bench(plan)}
    greedy = outputs(by_cell["plain", 0, 1])
    assert greedy[0] == greedy[1]
    assert greedy == outputs(by_cell["speculative", 0, 1]) == outputs(by_cell["plain", 0, 3])
    sampled = outputs(by_cell["plain", 1, 1])
    assert sampled[0] != sampled[1]
    assert sampled == outputs(by_cell["plain", 1, 3])
    engine = Engine(tiny_pair()["target"], None, running.MethodSpec("plain").method)
    expected = engine.generate(
        ["return x"], Sampling(temperature=1, seed=1, max_new_tokens=8), request_numbers=[64]
    )
    assert expected[0].token_ids == sampled[1][1]


def test_times_come_from_the_clock_alone() -> None:
    """A batch of one request with n rounds reads the clock n + 2 times and a prefill step: plain
    decoding of 8 tokens has 8 rounds."""
    plain, speculative = bench(tiny_plan())
    for repeat in plain.repeats:
        for batch in repeat.batches:
            (request,) = batch.requests
            assert request.round_tokens == (1,) * 8
            assert request.round_seconds == tuple(range(1, 9))
            assert batch.seconds == 9
    rounds = [len(r.round_seconds) for repeat in speculative.repeats for r in repeat.requests]
    assert max(rounds) <= 8
    assert speculative.speed["rounds"] == sum(rounds)
    assert speculative.speedup is not None
    seconds = sum(each + 1 for each in rounds)
    assert speculative.speedup["ratio"] == pytest.approx(6 * 9 / seconds)


def test_the_clock_is_read_once_per_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring adds one call of the clock per step of the scheduler, and two per batch."""
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return float(reads)

    engine = Engine(tiny_pair()["target"], None, running.MethodSpec("plain").method)
    steps = 0
    real = engine.new_scheduler

    def new_scheduler() -> Any:
        scheduler = real()
        step = scheduler.step

        def counted() -> Any:
            nonlocal steps
            steps += 1
            return step()

        monkeypatch.setattr(scheduler, "step", counted)
        return scheduler

    monkeypatch.setattr(engine, "new_scheduler", new_scheduler)
    sampling = Sampling(temperature=0, max_new_tokens=8)
    list(measuring.run_examples(engine, tiny_data().examples, sampling, 3, clock))
    assert reads == steps + 2


@pytest.mark.parametrize("before", [0, 5])
def test_old_objects_are_not_searched_for_garbage_while_outputs_are_timed(
    before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless somebody else has set objects aside, whom an unfreeze would surprise."""
    seen: list[str] = []
    real = running.run_examples

    def run_examples(*arguments: Any) -> Any:
        seen.append("run")
        return real(*arguments)

    monkeypatch.setattr(running, "run_examples", run_examples)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: before)
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: seen.append(name))
    bench(tiny_plan(methods=["plain"], repeats=1, max_repeats=1, warmup=0))
    warm_up = ["run"]
    assert seen == warm_up + (["run"] if before else ["freeze", "run", "unfreeze"])


def test_repeats_are_interleaved_and_shuffled(calls: list[tuple[str, float, int, int]]) -> None:
    plan = tiny_plan(
        methods=["speculative", "block", "coupled"], repeats=3, max_repeats=3, warmup=0
    )
    bench(plan)
    timed = calls
    assert len(timed) == 3 * 4 + 4  # with one empty warm-up of each engine
    first_seeds = sorted({seed for _, _, seed, _ in timed})
    assert first_seeds == [0, 1, 2]
    seeds = [seed for _, _, seed, _ in timed]
    assert seeds == sorted(seeds)
    orders = [[name for name, _, seed, _ in timed if seed == wanted] for wanted in (1, 2)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_later_turns_follow_the_models_own_answers() -> None:
    examples = (
        replace(tiny_data(1).examples[0], later=(Turn("print(", "second"), Turn("x"))),
        tiny_data(2).examples[1],
    )
    data = DataSet("turns", examples, "hash", "memory", "prompts")
    seen: list[tuple[list[Any], list[str]]] = []

    @metric("seen")
    def look(examples: Sequence[Any], results: Sequence[Any], target: HFModel) -> Mapping[str, Any]:
        seen.append((list(examples), [result.text for result in results]))
        return {"number": len(results)}

    target = tiny_pair()["target"]
    words: Any = target.tokenizer
    words.chat_template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    try:
        plan = tiny_plan(
            repeats=1, max_repeats=1, batch_sizes=[2], metrics=["seen"],
            data=[{"source": "memory", "prompts": "chat"}],
        )  # fmt: skip
        results = bench(plan, data={"memory": data})
    finally:
        words.chat_template = None
        METRICS._entries.pop("seen")
    plain = results[0]
    asked = [(r.example, r.turn) for r in plain.repeats[0].requests]
    assert asked == [(0, 0), (1, 0), (0, 1), (0, 2)]
    examples_seen, texts = seen[0]
    assert [each.reference for each in examples_seen] == [
        "reference 0",
        "reference 1",
        "second",
        None,
    ]
    contents = [message["content"] for message in examples_seen[3].messages]
    assert contents == ["def f(x):\n", texts[0], "print(", texts[2], "x"]
    assert plain.metrics == {"seen": {"number": 4}}


def test_forced_references_are_the_outputs() -> None:
    """Of both methods, up to the maximum length, at any temperature."""
    plan = tiny_plan(temperatures=[1], data=[{"source": "memory", "forced": True}])
    words: Any = tiny_pair()["target"].tokenizer
    references = [words(f"reference {i}")["input_ids"][:8] for i in range(3)]
    for result in bench(plan):
        for repeat in result.repeats:
            assert [list(each.token_ids) for each in repeat.requests] == references
    bare = replace(tiny_data(), examples=(replace(tiny_data().examples[0], reference=None),))
    with pytest.raises(
        InvalidParameterError, match="example '0' of data set tiny has no reference"
    ):
        bench(plan, data={"memory": bare})


def test_errors_of_a_method_do_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    real = running.run_examples

    def run_examples(engine: Engine, *rest: Any) -> Any:
        if engine.method.name == "block":
            raise NonFiniteLogitsError("draft produced NaN")
        yield from real(engine, *rest)

    monkeypatch.setattr(running, "run_examples", run_examples)
    results = bench(tiny_plan(methods=["speculative", "block"]))
    failed = {result.cell.method: result.error for result in results}
    assert failed == {"plain": "", "speculative": "", "block": "draft produced NaN"}
    assert results[2].repeats == ()
    assert results[2].speedup is None


def test_progress_counts_repeats_and_estimates_the_time_left() -> None:
    seen: list[Progress] = []
    run_bench(
        tiny_plan(warmup=0),
        seen.append,
        models=tiny_pair(),
        data={"memory": tiny_data()},
        clock=ticking(),
    )
    timed = [each for each in seen if "repeat" in each.stage]
    assert [each.done for each in timed] == [0, 1, 2, 3]
    assert {each.total for each in timed} == {4}
    assert timed[0].seconds_left is None
    left = [each.seconds_left for each in timed[1:]]
    assert all(each is not None and each > 0 for each in left)
    assert "speculative, γ 3, T 0, tiny, batch 1, repeat 1" in {each.stage for each in timed}
    assert seen[-1].done == 4
    assert seen[-1].seconds_left == 0


# ------------------------------------------------------------------------------------- resume


def test_a_finished_run_measures_nothing_again(
    tmp_path: Path, calls: list[tuple[str, float, int, int]]
) -> None:
    first = bench(tiny_plan(), folder=tmp_path)
    calls.clear()
    second = bench(tiny_plan(), folder=tmp_path)
    assert calls == []
    assert [each.repeats for each in second] == [each.repeats for each in first]
    assert [as_json(each) for each in read_cells(tmp_path)] == [as_json(each) for each in second]


@pytest.mark.parametrize("cut", [1, 40, 4000])
def test_a_run_killed_in_the_middle_of_a_line_is_resumed(
    tmp_path: Path, calls: list[tuple[str, float, int, int]], cut: int
) -> None:
    """The last line of the journal is incomplete: its repeat alone runs again."""
    bench(tiny_plan(), folder=tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) == 4
    journal.write_bytes(b"".join(lines[:3]) + lines[3][: min(cut, len(lines[3]) - 1)])
    calls.clear()
    results = bench(tiny_plan(warmup=0), folder=tmp_path)
    assert len([call for call in calls if call[2] == 1]) == 1
    after = journal.read_bytes().splitlines(keepends=True)
    assert after[:3] == lines[:3]
    assert len(after) == 4
    assert all(len(result.repeats) == 2 for result in results)


def test_interrupting_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, runs = running.run_examples, 0

    def run_examples(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs == 4:  # a warm-up and a repeat of each method are over
            raise KeyboardInterrupt
        yield from real(*arguments)

    monkeypatch.setattr(running, "run_examples", run_examples)
    with pytest.raises(KeyboardInterrupt):
        bench(tiny_plan(), folder=tmp_path)
    (result,) = read_cells(tmp_path)
    assert len(result.repeats) == 1
    monkeypatch.setattr(running, "run_examples", real)
    results = bench(tiny_plan(), folder=tmp_path)
    assert [len(each.repeats) for each in results] == [2, 2]
    assert result.repeats[0] in [each.repeats[0] for each in results]


def test_another_plan_uses_what_it_can_and_loses_nothing(
    tmp_path: Path, calls: list[tuple[str, float, int, int]]
) -> None:
    first = bench(tiny_plan(), folder=tmp_path)
    calls.clear()
    other = tiny_plan(methods=["speculative", "block"], gammas=[2])
    second = bench(other, folder=tmp_path)
    assert {name for name, *_ in calls} == {"speculative", "block"}  # plain is there
    keys = [result.key for result in read_cells(tmp_path)]
    assert keys == [*(each.key for each in second), first[1].key]
    calls.clear()
    assert bench(tiny_plan(), folder=tmp_path)[1].repeats == first[1].repeats
    assert calls == []


def test_a_damaged_journal_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    bench(tiny_plan(), folder=tmp_path)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text(lines[0] + "rubbish\n" + lines[1])
    with pytest.raises(InvalidParameterError, match=r"journal\.jsonl', line 2: .*remove the line"):
        bench(tiny_plan(), folder=tmp_path)


def test_a_full_disk_is_an_error_and_loses_no_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno
    import os

    real, calls = os.fsync, 0

    def fsync(file: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(InvalidParameterError, match=r"cannot write journal .*No space left"):
        bench(tiny_plan(), folder=tmp_path)
    assert [len(each.repeats) for each in read_cells(tmp_path)] == [2, 1]
    monkeypatch.setattr(os, "fsync", real)
    assert [len(each.repeats) for each in bench(tiny_plan(), folder=tmp_path)] == [2, 2]


def test_lines_that_are_no_results_are_kept(tmp_path: Path) -> None:
    (tmp_path / "cells.jsonl").write_text("rubbish\n")
    bench(tiny_plan(), folder=tmp_path)
    with pytest.raises(InvalidParameterError, match="line 3: no cell"):
        read_cells(tmp_path)


def test_results_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="no results in"):
        read_cells(tmp_path)
    for content in (b"{}\n", b"\xdd\n"):
        (tmp_path / "cells.jsonl").write_bytes(content)
        with pytest.raises(InvalidParameterError, match="line 1: no cell of outrider bench"):
            read_cells(tmp_path)


# --------------------------------------------------------------------------------------- keys


def keys(plan: BenchPlan | None = None, **more: Any) -> list[str]:
    plan = tiny_plan() if plan is None else plan
    arguments: dict[str, Any] = {"models": tiny_pair(), "data": {"memory": tiny_data()}} | more
    made = running.Bench(plan, None, None, clock=ticking(), **arguments)
    return [planned.cell.key for planned in made.cells]


@pytest.mark.parametrize(
    "change",
    [
        {"max_new_tokens": 9},
        {"temperatures": [0.5]},
        {"top_k": 3},
        {"seed": 1},
        {"batch_sizes": [2]},
        {"ignore_eos": True},
        {"data": [{"source": "memory", "limit": 2}]},
        {"data": [{"source": "memory", "forced": True}]},
        {"meters": ["energy-model"]},
    ],
)
def test_settings_change_all_keys(change: dict[str, Any]) -> None:
    assert not set(keys()) & set(keys(tiny_plan(**change)))


def test_labels_repeats_and_other_cells_change_no_key() -> None:
    plan = tiny_plan(methods=["speculative:label=x", "block"], repeats=3, max_repeats=9, warmup=2)
    assert keys(plan)[:2] == keys()


def test_parameters_change_the_key_of_their_method() -> None:
    plain, one = keys(tiny_plan(methods=["mentored:budget=0.1"]))
    same, other = keys(tiny_plan(methods=["mentored:budget=0.2"]))
    assert plain == same
    assert one != other
    assert keys(tiny_plan(gammas=[2]))[1] != keys()[1]


def test_models_change_keys() -> None:
    pair = tiny_pair()
    other = HFModel(
        tiny_module(seed=2, vocab_size=pair["draft"].num_tokens), pair["draft"].tokenizer
    )
    plain, speculative = keys()
    same, changed = keys(models=pair | {"draft": other})
    assert plain == same  # the baseline has no draft
    assert changed != speculative
    assert not {plain, speculative} & set(keys(models={"target": other, "draft": pair["draft"]}))


def test_data_changes_keys() -> None:
    data = replace(tiny_data(), sha256="another file")
    assert not set(keys()) & set(keys(data={"memory": data}))
    assert keys(data={"memory": replace(tiny_data(), name="another name")}) == keys()


def test_code_changes_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.lab.bench import identity

    (tmp_path / "core").mkdir()
    (tmp_path / "cli").mkdir()
    file = tmp_path / "core" / "a.py"
    file.write_text("x = 1\n")
    (tmp_path / "cli" / "b.py").write_text("y = 1\n")
    unhashed = identity.source_hash.__wrapped__
    before = unhashed(tmp_path, ("core",))
    (tmp_path / "cli" / "b.py").write_text("y = 2\n")
    assert unhashed(tmp_path, ("core",)) == before  # does not run while a cell is timed
    file.write_text("x = 2\n")
    assert unhashed(tmp_path, ("core",)) != before
    old = keys()
    monkeypatch.setattr(identity, "source_hash", lambda: "other code")
    assert not set(keys()) & set(old)


def test_files_of_options_change_keys(tmp_path: Path) -> None:
    from outrider.lab.bench.identity import method_identity
    from outrider.lab.bench.method_spec import MethodSpec

    file = tmp_path / "table"
    spec = MethodSpec("staged", {"inner": "lookup", "file": str(file)})
    file.write_text("one")
    first = method_identity(spec, None)
    file.write_text("two")
    assert method_identity(spec, None) != first


# ----------------------------------------------------------------------------------- widening


def noisy(engine_speeds: Mapping[str, Sequence[float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat r of a method takes the seconds per batch that the table says."""
    real = running.run_examples

    def run_examples(engine: Engine, examples: Any, sampling: Sampling, *more: Any) -> Any:
        speeds = engine_speeds[engine.method.name]
        for batch in real(engine, examples, sampling, *more):
            yield replace(batch, seconds=speeds[sampling.seed % len(speeds)])

    monkeypatch.setattr(running, "run_examples", run_examples)


def test_unsteady_cells_are_repeated_with_their_baselines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block's second repeat is slower, which the fourth one evens out; the other method is steady
    from the beginning and is not repeated."""
    noisy({"plain": [1.0], "speculative": [1.0], "block": [1.0, 1.06, 1.0, 1.0]}, monkeypatch)
    results = bench(tiny_plan(methods=["speculative", "block"], max_repeats=9))
    lengths = {result.cell.method: len(result.repeats) for result in results}
    assert lengths == {"plain": 4, "speculative": 2, "block": 4}
    assert all(result.speedup["steady"] for result in results if result.speedup)


def test_repeats_end_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy({"plain": [1.0], "speculative": [1.0, 2.0]}, monkeypatch)
    plain, speculative = bench(tiny_plan(max_repeats=5))
    assert (len(plain.repeats), len(speculative.repeats)) == (5, 5)
    assert speculative.speedup is not None
    assert not speculative.speedup["steady"]


# -------------------------------------------------------------------------- metrics and meters


def test_metrics_are_computed_once(tmp_path: Path) -> None:
    computed: list[int] = []

    @metric("count")
    def count(
        examples: Sequence[Any], results: Sequence[Any], target: HFModel
    ) -> Mapping[str, Any]:
        computed.append(len(results))
        assert [each.prompt for each in examples] == [each.prompt for each in results]
        assert all(each.prompt_ids and each.origins for each in results)
        return {"tokens": sum(len(each.token_ids) for each in results)}

    try:
        plan = tiny_plan(metrics=["count"])
        first = bench(plan, folder=tmp_path)
        second = bench(plan, folder=tmp_path)
    finally:
        METRICS._entries.pop("count")
    assert computed == [6, 6]
    assert [each.metrics for each in first] == [{"count": {"tokens": 48}}] * 2
    assert [each.metrics for each in second] == [each.metrics for each in first]


def test_divergences_are_measured_in_a_run_of_their_own() -> None:
    """The timed runs measure none; the metric's outputs have them, for the lossy rule alone."""

    @metric("kl", needs_divergence=True)
    def kl(examples: Sequence[Any], results: Sequence[Any], target: HFModel) -> Mapping[str, Any]:
        return {"positions": sum(result.stats.measured for result in results)}

    try:
        plan = tiny_plan(methods=["mentored:budget=0.5"], temperatures=[1], metrics=["kl"])
        plain, mentored = bench(plan)
    finally:
        METRICS._entries.pop("kl")
    assert plain.metrics["kl"]["positions"] == 0
    assert mentored.metrics["kl"]["positions"] > 0
    assert not mentored.lossless
    timed = [request.total() for repeat in mentored.repeats for request in repeat.requests]
    assert all(stats.measured == 0 for stats in timed)


def test_meters_surround_each_repeat() -> None:
    class Counter:
        def __init__(self) -> None:
            self.begun = self.ended = 0

        def begin(self) -> None:
            self.begun += 1

        def end(self) -> Mapping[str, Any]:
            self.ended += 1
            return {"runs": self.ended}

    counter = Counter()
    meter("counter")(lambda: counter)
    try:
        results = bench(tiny_plan(meters=["counter"]))
    finally:
        METERS._entries.pop("counter")
    runs = [repeat.readings["counter"]["runs"] for each in results for repeat in each.repeats]
    assert sorted(runs) == [1, 2, 3, 4]
    assert counter.begun == 4


def test_metrics_and_meters_that_cannot_work() -> None:
    with pytest.raises(InvalidParameterError, match="unknown metric 'nothing'"):
        bench(tiny_plan(metrics=["nothing"]))
    with pytest.raises(InvalidParameterError, match="unknown meter 'nothing'"):
        bench(tiny_plan(meters=["nothing"]))

    @metric("needs", needs_reference=True)
    def needs(examples: Any, results: Any, target: Any) -> Mapping[str, Any]:
        return {}

    bare = replace(tiny_data().examples[0], id="bare", reference=None)
    without = replace(tiny_data(), examples=(*tiny_data().examples, bare))
    try:
        with pytest.raises(InvalidParameterError, match=r"'needs' needs reference.*'bare'"):
            bench(tiny_plan(metrics=["needs"]), data={"memory": without})
    finally:
        METRICS._entries.pop("needs")


def test_every_turn_is_checked_before_anything_is_measured(
    calls: list[tuple[str, float, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MT-bench, only some questions have reference answers to their second turn."""
    first = replace(tiny_data().examples[0], id="two", reference="a", later=(Turn("more"),))
    data = replace(tiny_data(), examples=(first,))
    chat = [{"source": "memory", "prompts": "chat"}]
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    monkeypatch.setattr(tiny_pair()["target"].tokenizer, "chat_template", template)

    def has_answer(example: Example) -> None:
        if example.reference is None:
            raise InvalidParameterError(f"no answer to {example.messages[0]['content']!r}")

    @metric("answered", check_example=has_answer)
    def answered(examples: Any, results: Any, target: Any) -> Mapping[str, Any]:
        return {}

    try:
        with pytest.raises(InvalidParameterError, match=r"no answer to .more."):
            bench(tiny_plan(data=chat, metrics=["answered"]), data={"memory": data})
    finally:
        METRICS._entries.pop("answered")
    with pytest.raises(InvalidParameterError, match=r"'two'.*none for each of its turns"):
        bench(tiny_plan(data=chat, metrics=["exact-match"]), data={"memory": data})
    for name, message in (("gsm8k", "'0' has no number"), ("pass@k", "'0' has none")):
        bare = replace(tiny_data(), examples=(replace(tiny_data().examples[0], reference="a"),))
        with allow_generated_code(), pytest.raises(MissingReferenceError, match=message):
            bench(tiny_plan(metrics=[name]), data={"memory": bare})
    assert calls == []


def test_no_repeat_knows_the_outputs_of_another() -> None:
    """Greedy outputs are equal in all repeats, so that a corpus of them would draft them whole."""
    plan = {"methods": ["suffix:gamma=4"], "repeats": 3, "max_repeats": 3, "batch_sizes": [3]}
    _, suffix = bench(tiny_plan(**plan))
    accepted = [[each.total().accepted for each in repeat.requests] for repeat in suffix.repeats]
    assert accepted[0] == accepted[1] == accepted[2]
    _, remembering = bench(tiny_plan(**plan, remember=True))
    first, second, _ = [
        sum(each.total().accepted for each in repeat.requests) for repeat in remembering.repeats
    ]
    assert second > sum(accepted[1])
    assert remembering.key != suffix.key
    assert first >= sum(accepted[0])  # the warm-up's outputs are remembered, too


def test_bad_data_is_found_before_anything_is_measured(
    calls: list[tuple[str, float, int, int]],
) -> None:
    long = replace(tiny_data().examples[0], id="long", prompt="x" * 500)
    data = replace(tiny_data(), examples=(*tiny_data().examples, long))
    with pytest.raises(PromptError, match="data set tiny, example 'long': the prompt has"):
        bench(tiny_plan(), data={"memory": data})
    assert calls == []
    with pytest.raises(InvalidParameterError, match="two data sets are called 'tiny'"):
        bench(tiny_plan(data=["memory", "more"]), data={"memory": tiny_data(), "more": tiny_data()})


def test_samples_have_the_text_and_origin_of_each_token() -> None:
    _, speculative = bench(tiny_plan())
    assert [sample["id"] for sample in speculative.samples] == ["0", "1", "2"]
    request = next(speculative.repeats[0].requests)
    pieces = speculative.samples[0]["pieces"]
    assert "".join(origin for _, origin in pieces) == request.origins
    assert "".join(text for text, _ in pieces) == request.text
