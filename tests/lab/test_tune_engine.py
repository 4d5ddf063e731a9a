"""Tuning with real engines: tiny models, a clock that ticks, and no time that means anything."""

from pathlib import Path
from typing import Any

import pytest
from tiny_bench import tiny_data, tiny_pair, tiny_plan
from tiny_models import tiny_module

from outrider.core.errors import IncompatibleError, InvalidParameterError, PromptError
from outrider.lab.bench import MethodSpec
from outrider.lab.bench.engines import Engines
from outrider.lab.data import DataSet, Example
from outrider.lab.tune.acceptance import Acceptance
from outrider.lab.tune.engine_machine import EngineMachine
from outrider.lab.tune.machine import PLAIN, rounds_of
from outrider.lab.tune.run import Candidates, tuner_of
from outrider.lab.tune.sources import candidates, count_answers
from outrider.lab.tune.tuning import TuneSettings
from outrider.runtime import HFModel
from outrider.train.ngram import build_ngram


class Clock:
    """A clock that goes on by a millisecond at each call."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def machine(data: DataSet | None = None, **more: Any) -> EngineMachine:
    plan = tiny_plan(methods=["plain"], batch_sizes=[1, 2], **more.pop("plan", {}))
    models = tiny_pair()
    return EngineMachine(Engines(plan, models), plan, data or tiny_data(4), clock=Clock(), **more)


def test_a_run_has_the_depth_of_every_round() -> None:
    """A model drafts γ tokens in every round, except at the end of an output."""
    tiny = machine(plan={"ignore_eos": True})
    source = tiny.source("the draft", "speculative", "draft", 4)
    assert source.lengths == (1, 2, 3, 4)
    run = tiny.run(source, 3, [[0, 1], [2, 0]], 20, 0)
    assert [[each.example for each in batch.requests] for batch in run.batches] == [[0, 1], [2, 0]]
    for batch, depths in zip(run.batches, run.depths, strict=True):
        for request, drafted in zip(batch.requests, depths, strict=True):
            assert len(drafted) == len(request.round_tokens)
            before = 0
            for depth, tokens in zip(drafted, request.round_tokens, strict=True):
                assert depth == min(3, 20 - before - 1)
                assert tokens <= depth + 1
                before += tokens
            assert before == 20
    assert run.round_seconds is not None
    assert run.round_seconds > 0


def test_acceptance_is_that_of_the_engines_statistics() -> None:
    """A draft equal to the target has everything accepted at temperature 0; another one as often
    as the engine counts."""
    tiny = machine(plan={"ignore_eos": True})
    same = EngineMachine(
        Engines(tiny_plan(batch_sizes=[2]), tiny_pair() | {"draft": tiny_pair()["target"]}),
        tiny_plan(batch_sizes=[2], ignore_eos=True),
        tiny_data(4),
        clock=Clock(),
    )
    for each, perfect in ((same, True), (tiny, False)):
        source = each.source("the draft", "speculative", "draft", 3)
        run = each.run(source, 3, [[0, 1]], 60, 0)
        found = Acceptance(rounds_of(run, 60, 3))
        stats = [request.total() for batch in run.batches for request in batch.requests]
        if perfect:
            assert found.survival(3) == [1.0, 1.0, 1.0]
        else:
            accepted = sum(one.accepted for one in found.all_rounds)
            assert accepted <= sum(one.accepted for one in stats)
            assert found.survival(3)[0] < 1.0


def test_suffix_decoding_is_tuned_without_its_memory(tmp_path: Path) -> None:
    """Otherwise the second run of a prompt would copy the first one's output."""
    tiny = machine(plan={"ignore_eos": True})
    (source,) = [each for each in candidates(tiny, ["draft"]) if each.name == "suffix decoding"]
    first, second = (tiny.run(source, 4, [[0, 1]], 24, 0) for _ in range(2))
    assert first.depths == second.depths


def test_a_named_suffix_decoding_has_no_memory_either() -> None:
    """Nor does a method keep it that also sets another option."""
    found = candidates(machine(), [], ["suffix", "suffix:factor=2", "suffix:corpus_tokens=0"])
    assert [each.method for each in found] == [
        "suffix:corpus_tokens=0",
        "suffix:factor=2,corpus_tokens=0",
    ]
    with pytest.raises(InvalidParameterError, match="write corpus_tokens=0"):
        candidates(machine(), [], ["suffix:corpus_tokens=100"])
    assert candidates(machine(), [], ["plain"]) == []


def test_drafts_in_folders_of_one_name_are_told_apart() -> None:
    """Acceptance and times are kept by name: two drafts of one name would be mixed up."""
    draft = tiny_pair()["draft"]
    models = tiny_pair() | {"a/best": draft, "b/best": draft}
    plan = tiny_plan(methods=["plain"])
    tiny = EngineMachine(Engines(plan, models), plan, tiny_data(2), clock=Clock())
    found = candidates(tiny, ["a/best", "b/best", "a/best"], ["block", "suffix", "suffix"])
    assert [(each.name, each.draft) for each in found] == [
        ("block with best (a/best)", "a/best"),
        ("block with best (b/best)", "b/best"),
        ("suffix:corpus_tokens=0", None),
    ]


def test_the_candidates_of_a_target(tmp_path: Path) -> None:
    tiny = machine(tiny_data(8), num_held_out=2)
    file = count_answers(tiny, tmp_path / "t.ngram", build_ngram, max_new_tokens=12, clock=Clock())
    assert tiny.num_prompts == 6
    names = [each.name for each in candidates(tiny, ["draft"], ngram_file=file, longest=5)]
    assert names == [
        "the draft draft",
        "prompt lookup",
        "suffix decoding",
        "the n-gram table",
        "early exit",
    ]
    assert len(candidates(tiny, ["draft"], divergence_budget=0.3, longest=5)) == len(names) - 1
    sampled = machine(plan={"temperatures": [1.0]})
    with_budget = candidates(sampled, ["draft"], divergence_budget=0.3)
    assert [each.method for each in with_budget if "mentored" in each.name] == [
        "mentored:budget=0.3"
    ]
    trees = candidates(tiny, ["draft"], ["sequoia:topology=2,1", "block:gamma=3"])
    assert [each.lengths for each in trees] == [(2,), (3,)]
    assert count_answers(machine(), tmp_path / "u", build_ngram, max_new_tokens=4) is None


def test_lossy_methods_need_a_divergence_budget() -> None:
    tiny = machine(plan={"temperatures": [1.0]})
    with pytest.raises(InvalidParameterError, match="pass a divergence budget"):
        candidates(tiny, ["draft"], ["lenience:lenience=0.1"])
    for budget, fits in ((100.0, True), (1e-6, False)):
        allowed = machine(plan={"temperatures": [1.0]}, divergence_budget=budget)
        (source,) = candidates(
            allowed, ["draft"], ["lenience:lenience=0.1"], divergence_budget=budget
        )
        if fits:
            assert allowed.run(source, 3, [[0, 1]], 24, 0).tokens
        else:
            with pytest.raises(Exception, match="nats per token, more than the budget of 1e-06"):
                allowed.run(source, 3, [[0, 1]], 24, 0)


def test_a_divergence_that_cannot_be_measured_keeps_no_budget() -> None:
    allowed = machine(plan={"temperatures": [0.0]}, divergence_budget=100.0)
    (source,) = candidates(allowed, ["draft"], ["relaxed"], divergence_budget=100.0)
    with pytest.raises(IncompatibleError, match="diverges from the target cannot be measured"):
        allowed.run(source, 3, [[0]], 24, 0)


def test_a_method_without_a_fitting_draft() -> None:
    with pytest.raises(InvalidParameterError, match="needs a head of kind 'eagle3', and no draft"):
        candidates(machine(), ["draft"], ["eagle3"])


@pytest.mark.parametrize("width", [1, 5])
def test_passes_are_timed_with_ragged_prompts(width: int) -> None:
    """Each of six passes reads the clock twice, which goes on by a millisecond in between."""
    assert machine().pass_seconds(3, width) == pytest.approx(0.001)


def test_prompts_of_one_token_are_refused() -> None:
    data = DataSet("short", (Example("def f(x):"), Example("d", id="7")), "", "memory", "prompts")
    with pytest.raises(PromptError, match="example '7': the prompt has a single token"):
        machine(data)


def test_tuning_real_engines(tmp_path: Path) -> None:
    """From a plan to an answer; lossless outputs, so plain decoding and all sources emit as many
    tokens."""
    stages: list[str] = []
    settings = TuneSettings((1, 2), 0.1, 24)
    tuning = tuner_of(
        tiny_plan(methods=["plain"], batch_sizes=[1, 2], max_new_tokens=24, ignore_eos=True),
        settings,
        Candidates(("draft",), (), 3, None, tmp_path / "t.ngram", build_ngram),
        lambda stage, share: stages.append(stage),
        models=tiny_pair(),
        data={"memory": tiny_data(8)},
        clock=Clock(),
    ).run()
    assert tuning.answer is not None
    assert not tuning.errors
    assert set(tuning.acceptance) >= {"the draft draft", "prompt lookup", "the n-gram table"}
    assert list(tuning.answer.best) == [1, 2]
    measured = [each for each in tuning.answer.estimates if each.ratio is not None]
    assert measured
    for configuration, repeats in tuning.trials.repeats.items():
        assert {each.tokens for each in repeats} == {
            24 * sum(len(batch.requests) for batch in repeats[0].batches)
        }, configuration
    assert "forward passes at batch 2" in stages
    assert MethodSpec.parse(PLAIN.method).name == "plain"


def test_an_early_exit_needs_layers_to_leave_out(tmp_path: Path) -> None:
    """A source that does not work with the target is noted, and the others are tuned."""
    one = tiny_module(vocab_size=tiny_pair()["target"].num_tokens, num_hidden_layers=1)
    target = HFModel(one, tiny_pair()["target"].tokenizer, name="target")
    tuning = tuner_of(
        tiny_plan(methods=["plain"], max_new_tokens=24, ignore_eos=True),
        TuneSettings((1,), 0.05, 24),
        Candidates(("draft",), longest=2),
        models={"target": target, "draft": tiny_pair()["draft"]},
        data={"memory": tiny_data(2)},
        clock=Clock(),
    ).run()
    assert "early exit" in tuning.errors
    assert "prompt lookup" in tuning.acceptance
