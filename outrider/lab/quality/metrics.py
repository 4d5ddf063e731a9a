"""The metrics of quality that ``outrider bench`` knows by name.

    perplexity    of the outputs under the target, micro and macro
    distinct      distinct-1, -2 and -3
    divergence    measured divergence of a lossy rule, per token
    rouge         ROUGE-1, ROUGE-2 and ROUGE-L against the reference
    bleu          BLEU and chrF against the reference
    exact-match   short answers against the reference
    gsm8k         final numbers against the reference
    pass@k        programs that pass their tests, for k = 1 and each k up to 100 that the number of
                  repeats allows: 10, 100

``each`` holds the values of the single outputs, in their order, for paired comparisons over
prompts (``bootstrap.py``). Means are over outputs.
"""

import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.errors import OutriderWarning
from outrider.engine import Result, Stats
from outrider.lab.bench.metric import metric
from outrider.lab.data import Example
from outrider.lab.quality import exact_match as answers
from outrider.lab.quality.distinct import distinct_n
from outrider.lab.quality.errors import MissingReferenceError
from outrider.lab.quality.pass_at_k import Task, mean_pass_at_k, run_tests
from outrider.lab.quality.perplexity import output_perplexity
from outrider.lab.quality.rouge import require_rouge_score, rouge
from outrider.lab.quality.translation import (
    require_sacrebleu,
    sentence_scores,
    translation_scores,
)
from outrider.lab.sandbox import enforced_by_kernel
from outrider.lab.sandbox.consent import require_consent
from outrider.runtime import HFModel

_KS = (1, 10, 100)


@metric("perplexity")
def perplexity_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``perplexity.py``."""
    found = output_perplexity(target, [(each.prompt_ids, each.token_ids) for each in results])
    return {
        "micro": found.micro,
        "macro": found.macro,
        "tokens": found.num_tokens,
        "each": {"nats_per_token": list(found.nats)},
    }


@metric("distinct")
def distinct_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``distinct.py``."""
    outputs = [each.token_ids for each in results]
    return {
        **{f"distinct-{n}": distinct_n(outputs, n) for n in (1, 2, 3)},
        "each": {f"distinct-{n}": [distinct_n([ids], n) for ids in outputs] for n in (1, 2, 3)},
    }


@metric("divergence", needs_divergence=True)
def divergence_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """The divergences between the distribution π of what was emitted and the target's p, as the
    engine measured them (``engine/stats.py``); 0 for a lossless method, which measures nothing."""
    stats = [each.stats for each in results]
    total = Stats.total(stats)
    return {
        "kl": total.kl_per_token,
        "reverse_kl": total.reverse_kl_per_token,
        "tv": total.tv_per_token,
        "measured_tokens": total.measured,
        "each": {"kl": [each.kl_per_token for each in stats]},
    }


@metric("rouge", needs_reference=True, check=require_rouge_score)
def rouge_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``rouge.py``."""
    each = rouge([result.text for result in results], references(examples, "rouge"))
    return {**{name: _mean(values) for name, values in each.items()}, "each": each}


@metric("bleu", needs_reference=True, check=require_sacrebleu)
def bleu_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``translation.py``."""
    texts = [result.text for result in results]
    pairs = list(zip(texts, references(examples, "bleu"), strict=True))
    return {**translation_scores(pairs), "each": sentence_scores(pairs)}


@metric("exact-match", needs_reference=True)
def exact_match_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``exact_match.py``."""
    pairs = zip(results, references(examples, "exact-match"), strict=True)
    each = [float(answers.exact_match(result.text, reference)) for result, reference in pairs]
    return {"exact_match": _mean(each), "each": {"exact_match": each}}


def final_number(example: Example) -> str:
    """The reference of an example, which must have a number.

    Raises:
        MissingReferenceError: it has none.
    """
    (reference,) = references([example], "gsm8k")
    if answers.last_number(reference) is None:
        raise MissingReferenceError(
            f"metric 'gsm8k': the reference of example {example.id!r} has no number, such as "
            "'#### 18': choose another metric, or another data set"
        )
    return reference


@metric("gsm8k", needs_reference=True, check_example=final_number)
def gsm8k_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``exact_match.py``."""
    expected = [final_number(example) for example in examples]
    pairs = [(result.text, answer) for result, answer in zip(results, expected, strict=True)]
    each = {
        "strict": [float(answers.gsm8k_strict(*pair)) for pair in pairs],
        "flexible": [float(answers.gsm8k_flexible(*pair)) for pair in pairs],
    }
    return {**{name: _mean(values) for name, values in each.items()}, "each": each}


def task_of(example: Example) -> Task:
    """The programming task of an example.

    Raises:
        MissingReferenceError: it has no tests.
    """
    tests, entry_point = example.extra.get("test"), example.extra.get("entry_point")
    if not isinstance(tests, str) or not isinstance(entry_point, str):
        raise MissingReferenceError(
            f"metric 'pass@k' needs tests, and example {example.id!r} has none: its record needs "
            "'test' and 'entry_point', as those of HumanEval"
        )
    prompt = example.prompt if isinstance(example.prompt, str) else example.prompt[-1]["content"]
    return Task(str(prompt), tests, entry_point)


@metric("pass@k", check=require_consent, check_example=task_of)
def pass_at_k_metric(
    examples: Sequence[Example], results: Sequence[Result], target: HFModel
) -> Mapping[str, Any]:
    """See ``pass_at_k.py`` and ``sandbox``."""
    require_consent()
    if not enforced_by_kernel():
        warnings.warn(
            OutriderWarning(
                "this system cannot confine generated code: an audit hook of Python is all that "
                "keeps it from files and processes; see outrider.lab.sandbox"
            ),
            stacklevel=2,
        )
    tasks = [task_of(example) for example in examples]
    samples = [(task, result.text) for task, result in zip(tasks, results, strict=True)]
    outcomes = run_tests(samples)
    by_task: dict[Task, list[bool]] = defaultdict(list)
    endings: dict[str, int] = defaultdict(int)
    for task, outcome in zip(tasks, outcomes, strict=True):
        by_task[task].append(outcome.passed)
        endings[outcome.ending] += 1
    fewest = min(map(len, by_task.values()), default=0)
    passed = list(by_task.values())
    return {
        **{f"pass@{k}": mean_pass_at_k(passed, k) for k in _KS if k <= fewest},
        "endings": dict(endings),
        "confined_by_kernel": enforced_by_kernel(),
        "each": {"passed": [float(outcome.passed) for outcome in outcomes]},
    }


def references(examples: Sequence[Example], name: str) -> list[str]:
    """The reference of each example.

    Raises:
        MissingReferenceError: one has none.
    """
    found = []
    for example in examples:
        if example.reference is None:
            raise MissingReferenceError(
                f"metric {name!r} needs reference answers, and example {example.id!r} has none: "
                "leave out the metric, or choose a data set with references"
            )
        found.append(example.reference)
    return found


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan
