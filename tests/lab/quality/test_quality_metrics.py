"""The registered metrics on the outputs of tiny models, and through the benchmark runner."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny_bench import ticking, tiny_data, tiny_pair, tiny_plan
from tiny_models import engine_of, greedy, tiny

from outrider import Result, Stats
from outrider.core.errors import InvalidParameterError, OutriderWarning
from outrider.lab.bench import METRICS, run_bench
from outrider.lab.data import Example
from outrider.lab.quality import metrics as registered
from outrider.lab.quality.compare import compare_cells
from outrider.lab.quality.errors import MissingMetricPackageError, MissingReferenceError
from outrider.lab.quality.perplexity import output_perplexity
from outrider.lab.sandbox import Outcome, allow_generated_code
from outrider.lab.sandbox.consent import GeneratedCodeError

EXTRA = {"test": "def check(f):\n    assert f(2) == 4\n", "entry_point": "double"}
TASKS = [
    Example('def double(x):\n    """Twice x."""\n', "    return 2 * x\n", id="first", extra=EXTRA),
    Example(({"role": "user", "content": "def double(x):\n"},), "    return x + x\n", extra=EXTRA),
]


def results(texts: Sequence[str]) -> list[Result]:
    """Results with these texts; of tokens and statistics only what a metric reads."""
    return [
        Result("", (1,), text, (1, 2), (), (), (), "length", Stats(emitted=2)) for text in texts
    ]


def computed(name: str, examples: Sequence[Example], texts: Sequence[str]) -> Any:
    return METRICS.find(name).compute(examples, results(texts), tiny())


def test_perplexity_of_the_outputs() -> None:
    target = tiny()
    outputs = engine_of(target).generate([[1, 2, 3], [4]], greedy(6))
    found = METRICS.find("perplexity").compute([Example("")] * 2, outputs, target)
    expected = output_perplexity(target, [(each.prompt_ids, each.token_ids) for each in outputs])
    assert (found["micro"], found["macro"]) == (expected.micro, expected.macro)
    assert found["each"]["nats_per_token"] == list(expected.nats)
    assert found["tokens"] == 12


def test_text_metrics() -> None:
    pytest.importorskip("rouge_score")
    pytest.importorskip("sacrebleu")
    examples = [Example("", "the cat sat on the mat"), Example("", "#### 18")]
    texts = ["The cat sat on the mat.", "It is 18."]
    found = computed("rouge", examples, texts)
    assert found["each"]["rouge1"][0] == 1
    assert found["rouge1"] == pytest.approx((1 + 0.5) / 2)  # 18, of "it is 18"
    bleu = computed("bleu", [examples[0]] * 2, [examples[0].reference or ""] * 2)
    assert bleu["bleu"] == pytest.approx(100)
    assert bleu["each"]["sentence_chrf"] == pytest.approx([100, 100])
    assert computed("exact-match", examples, texts)["each"]["exact_match"] == [1, 0]
    assert computed("distinct", examples, texts)["distinct-1"] == 0.5
    gsm8k = computed("gsm8k", [examples[1]] * 2, [texts[1], "so\n#### 18"])
    assert (gsm8k["strict"], gsm8k["flexible"]) == (0.5, 1)


def test_divergence_is_that_of_the_statistics() -> None:
    outputs = results(["", ""])
    lossy = [replace(outputs[0], stats=Stats(emitted=4, kl=1.0, tv=0.5, measured=3)), outputs[1]]
    found = METRICS.find("divergence").compute([], lossy, tiny())
    assert found["kl"] == pytest.approx(1 / 6)
    assert found["each"]["kl"] == [0.25, 0]
    assert found["measured_tokens"] == 3


def test_references_that_are_missing_are_named() -> None:
    bare = [Example("", None, id="bare")]
    for name in ("rouge", "bleu", "exact-match", "gsm8k"):
        with pytest.raises(MissingReferenceError, match="'bare' has none"):
            computed(name, bare, [""])
    with pytest.raises(MissingReferenceError, match="no number"):
        computed("gsm8k", [Example("", "none")], [""])


def test_generated_code_runs_only_where_it_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> list[Outcome]:
        raise AssertionError("generated code was run")

    monkeypatch.setattr(registered, "run_tests", never)
    entry = METRICS.find("pass@k")
    for call in (entry.check, lambda: computed("pass@k", TASKS, ["", ""])):
        with pytest.raises(GeneratedCodeError, match="--run-generated-code"):
            call()
    with pytest.raises(GeneratedCodeError):
        run_bench(tiny_plan(metrics=["pass@k"]), models=tiny_pair(), data={"memory": tiny_data()})


def test_programs_that_pass_their_tests() -> None:
    """Per task one of two programs passes; both tasks count equally."""
    right = ["    return 2 * x\n", "```python\ndef double(x):\n    return x * 2\n```"]
    texts = [right[0], right[1], "    return x\n", "    import os; os._exit(0)\n"]
    with allow_generated_code():
        METRICS.find("pass@k").check()
        found = computed("pass@k", TASKS * 2, texts)
        with pytest.raises(MissingReferenceError, match="'test' and 'entry_point'"):
            computed("pass@k", [Example("x")], [""])
    assert found["pass@1"] == 0.5
    assert "pass@10" not in found
    assert found["endings"] == {"passed": 2, "raised": 1, "died": 1}
    assert found["each"]["passed"] == [1, 1, 0, 0]


def test_a_system_that_cannot_confine_code_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "enforced_by_kernel", lambda: False)
    monkeypatch.setattr(registered, "run_tests", lambda samples: [Outcome("passed")])
    with allow_generated_code(), pytest.warns(OutriderWarning, match="cannot confine"):
        assert computed("pass@k", TASKS[:1], [""])["confined_by_kernel"] is False


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(MissingMetricPackageError, match=r"outrider\[quality\]"):
        run_bench(tiny_plan(metrics=["bleu"]), models=tiny_pair(), data={"memory": tiny_data()})


def test_a_plan_computes_metrics_and_reads_energy() -> None:
    plan = tiny_plan(
        methods=["speculative", "mentored:budget=0.5"],
        temperatures=[1],
        metrics=["perplexity", "distinct", "divergence"],
        meters=["energy-model"],
    )
    found = run_bench(plan, models=tiny_pair(), data={"memory": tiny_data()}, clock=ticking())
    plain, speculative, mentored = found
    for cell in found:
        assert cell.metrics["perplexity"]["macro"] > 1
        assert 0 < cell.metrics["distinct"]["distinct-1"] <= 1
        assert len(cell.metrics["perplexity"]["each"]["nats_per_token"]) == sum(
            len(list(repeat.requests)) for repeat in cell.repeats
        )
        for repeat in cell.repeats:
            reading = repeat.readings["energy-model"]
            assert reading["estimate"] is True
            assert reading["joules"] > 0
    assert plain.metrics["divergence"]["kl"] == speculative.metrics["divergence"]["kl"] == 0
    assert mentored.metrics["divergence"]["kl"] > 0
    assert math.isfinite(mentored.metrics["divergence"]["kl"])


def test_cells_are_compared_prompt_by_prompt() -> None:
    """The outputs of an example are one item: three examples, two repeats."""
    plan = tiny_plan(temperatures=[1], metrics=["perplexity", "distinct"])
    plain, speculative = run_bench(plan, models=tiny_pair(), data={"memory": tiny_data()})
    found = compare_cells(plain, speculative, "perplexity", "nats_per_token", num_resamples=50)
    nats = plain.metrics["perplexity"]["each"]["nats_per_token"]
    assert found.num_prompts == 3
    assert found.a == pytest.approx(sum(nats) / 6)
    assert found.low <= found.value <= found.high
    same = compare_cells(plain, plain, "distinct", "distinct-1")
    assert (same.value, same.low, same.high) == (0, 0, 0)
    values = [1.0, 2.0, math.nan, 3.0, 4.0, math.nan]
    some = replace(plain, metrics={"m": {"each": {"x": values}}})
    assert compare_cells(some, some, "m", "x").num_prompts == 2
    assert compare_cells(some, some, "m", "x").a == 2.5
    with pytest.raises(InvalidParameterError, match="--metric rouge"):
        compare_cells(plain, speculative, "rouge", "rougeL")
    other = replace(speculative, data={"sha256": "other"})
    with pytest.raises(InvalidParameterError, match="other prompts"):
        compare_cells(plain, other, "distinct", "distinct-1")
