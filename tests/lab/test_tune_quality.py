"""Lossy sources assessed by a metric: the share of the target's score, decided by intervals."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_bench import tiny_data, tiny_pair, tiny_plan

from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.lab.bench.engines import Engines
from outrider.lab.data import DataSet, Example
from outrider.lab.quality.errors import MissingReferenceError
from outrider.lab.tune.engine_machine import EngineMachine
from outrider.lab.tune.machine import Source
from outrider.lab.tune.quality import METRICS, QualityFloor, assess, with_references
from outrider.lab.tune.run import Candidates, tuner_of
from outrider.lab.tune.sources import candidates
from outrider.lab.tune.tuning import TuneSettings

NUM = 64
REFERENCES = [f"answer {number}" for number in range(NUM)]


def answers(share: float, seed: int = 0) -> Any:
    """Outputs of which a share, drawn at random, are right; and the prompts that were asked."""
    drawn = random.Random(seed)
    right = [drawn.random() < share for _ in range(NUM)]

    def texts(prompts: Sequence[int]) -> list[str]:
        return [REFERENCES[each] if right[each] else "?" for each in prompts]

    return texts


@pytest.mark.parametrize(
    ("share", "holds", "most"), [(1.0, True, 64), (0.0, False, 4), (0.5, False, 32)]
)
def test_what_is_clear_takes_few_prompts(share: float, holds: bool, most: int) -> None:
    found = assess(QualityFloor("exact_match", 0.9), REFERENCES, answers(1.0), answers(share))
    assert (found.holds, found.is_decided) == (holds, True)
    assert found.num_prompts <= most


def test_what_is_not_clear_takes_all_prompts_and_the_ratio_decides() -> None:
    floor = QualityFloor("exact_match", 0.9)
    texts = answers(0.9, seed=4)
    found = assess(floor, REFERENCES, answers(1.0), texts)
    assert found.num_prompts == NUM
    assert not found.is_decided
    right = sum(map(str.__eq__, texts(range(NUM)), REFERENCES)) / NUM
    assert found.ratio == found.score == right
    assert found.holds == (right >= 0.9)
    assert "which is not certain" in str(found)


def test_the_share_is_of_the_targets_own_score() -> None:
    """A target that is right half of the time, and a source that gives the same answers."""
    own = answers(0.5)
    found = assess(QualityFloor("exact_match", 0.95), REFERENCES, own, own)
    assert found.ratio == 1.0
    assert found.holds
    assert found.target_score < 1


def test_a_few_prompts_that_agree_prove_nothing() -> None:
    found = assess(QualityFloor("exact_match", 0.95), REFERENCES[:8], answers(1.0), answers(1.0))
    assert (found.num_prompts, found.is_decided, found.holds) == (8, False, True)


def test_no_time_ends_after_the_first_look() -> None:
    floor, texts = QualityFloor("exact_match", 0.9), answers(0.9, seed=4)
    assert assess(floor, REFERENCES, answers(1.0), texts, lambda: False).num_prompts == 4


def test_a_target_that_scores_nothing_is_no_measure() -> None:
    with pytest.raises(InvalidParameterError, match="the target's own outputs score 0"):
        assess(QualityFloor("exact_match"), REFERENCES, answers(0.0), answers(0.0))


@pytest.mark.parametrize("name", METRICS)
def test_a_copy_of_the_reference_scores_most(name: str) -> None:
    if name != "exact_match":
        pytest.importorskip("rouge_score" if name == "rouge_l" else "sacrebleu")
    floor, text = QualityFloor(name), "the quick brown fox jumps"
    same, other = floor.scores([text, "a lazy dog"], [text, text])
    assert same == pytest.approx(100 if name == "bleu" else 1)
    assert other < 0.2 * same


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("accuracy",), "metric='accuracy': must be exact_match, rouge_l or bleu"),
        (("bleu", 0.0), "at_least=0.0: must be above 0 and at most 1"),
        (("bleu", 1.5), "at_least=1.5: must be above 0 and at most 1"),
    ],
)
def test_demands_that_make_no_sense(arguments: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(InvalidParameterError, match=problem):
        QualityFloor(*arguments)


def test_references_of_a_file(tmp_path: Path) -> None:
    lines, records = tmp_path / "r.txt", tmp_path / "r.jsonl"
    lines.write_text("one\ntwo\n")
    records.write_text('{"reference": "one"}\n{"reference": "two"}\n')
    for file in (lines, records):
        found = with_references(tiny_data(2), file)
        assert [each.reference for each in found] == ["one", "two"]
    with pytest.raises(InvalidParameterError, match="it has 2, and data set tiny has 3 prompts"):
        with_references(tiny_data(3), lines)
    records.write_text('{"answer": "one"}\n')
    with pytest.raises(InvalidParameterError, match="line 1 has no text in the field 'reference'"):
        with_references(tiny_data(1), records)


TOKENS = 24
GREEDY: dict[str, Any] = {"temperatures": [0.0], "ignore_eos": True, "max_new_tokens": TOKENS}


def told_by_the_target(num: int) -> DataSet:
    """Prompts whose references are what the target says."""
    plan = tiny_plan(**GREEDY)
    engine = Engines(plan, tiny_pair()).plain
    sampling = replace(plan.sampling(0.0), max_new_tokens=TOKENS)
    data = tiny_data(num)
    examples = []
    for number, each in enumerate(data):
        prompt = f"{each.prompt}{number}"
        examples.append(
            replace(each, prompt=prompt, reference=engine.generate(prompt, sampling).text)
        )
    return replace(data, examples=tuple(examples))


@pytest.mark.parametrize(("method", "holds"), [("relaxed:top_k=1", True), ("relaxed", False)])
def test_a_lossy_source_has_to_reach_its_share(method: str, holds: bool) -> None:
    """Accepting only the target's own token gives its outputs; accepting the draft's whenever it is
    among many gives others."""
    method = method if holds else f"{method}:top_k=50,delta=1.0"
    plan = tiny_plan(**GREEDY)
    machine = EngineMachine(
        Engines(plan, tiny_pair()),
        plan,
        told_by_the_target(8),
        quality=QualityFloor("exact_match", 0.9),
    )
    (source,) = candidates(machine, ["draft"], [method], has_metric=True, longest=3)
    if holds:
        short = TOKENS // 2  # of a probe; the references are whole outputs
        assert machine.run(source, 3, [[0]], short, 0).tokens == short
    else:
        with pytest.raises(IncompatibleError, match=r"less than the 0\.9 that is demanded"):
            machine.run(source, 3, [[0]], TOKENS, 0)
    found = machine.qualities[source.name]
    assert found.holds is holds
    assert found.target_score == 1.0


def test_every_draft_of_a_lossy_method_is_assessed() -> None:
    """A draft that passes, the target itself, vouches for no other draft."""
    pair = tiny_pair()
    plan = tiny_plan(drafts=["itself", "draft"], **GREEDY)
    machine = EngineMachine(
        Engines(plan, {**pair, "itself": pair["target"]}),
        plan,
        told_by_the_target(4),
        quality=QualityFloor("exact_match", 0.9),
    )
    first, second = (
        Source(draft, "relaxed:top_k=50,delta=1.0", draft, (3,)) for draft in plan.drafts
    )
    machine.run(first, 3, [[0]], TOKENS, 0)
    with pytest.raises(IncompatibleError, match="less than"):
        machine.run(second, 3, [[0]], TOKENS, 0)


def test_a_metric_allows_several_budgets() -> None:
    plan = tiny_plan(temperatures=[1.0])
    machine = EngineMachine(
        Engines(plan, tiny_pair()), plan, tiny_data(4), quality=QualityFloor("exact_match")
    )
    names = [each.name for each in candidates(machine, ["draft"], has_metric=True)]
    assert names[1:4] == [f"mentored {budget} with the draft draft" for budget in (0.05, 0.2, 0.5)]


def test_mentored_is_no_candidate_where_its_outputs_cannot_be_assessed() -> None:
    """At temperature 0 it is lossless, so nothing would be compared; other commands would then use
    it at other temperatures."""
    plan = tiny_plan(**GREEDY)
    machine = EngineMachine(
        Engines(plan, tiny_pair()), plan, tiny_data(4), quality=QualityFloor("exact_match")
    )
    assert not any(
        "mentored" in each.name for each in candidates(machine, ["draft"], has_metric=True)
    )


def test_metrics_need_references(tmp_path: Path) -> None:
    bare = tiny_data(4)
    without = DataSet(
        bare.name,
        tuple(Example(each.prompt, id=each.id) for each in bare),
        bare.sha256,
        bare.source,
        bare.layout,
    )
    plan = tiny_plan(temperatures=[1.0], ignore_eos=True)
    given = Candidates(("draft",), ("mentored:budget=0.5",), 3, quality=QualityFloor("exact_match"))
    with pytest.raises(MissingReferenceError, match="needs reference answers"):
        tuner_of(
            plan, TuneSettings((1,), 5, 24), given, models=tiny_pair(), data={"memory": without}
        ).run()
