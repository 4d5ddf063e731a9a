"""The candidates of a tuning: every draft that is given, and what needs no draft.

    a folder of a head      by the head's own method
    a draft model           ``speculative``; at temperatures above 0 also ``mentored`` with the
                            divergence budget that is given, or with several where a metric
                            assesses the outputs. At temperature 0 it is ``speculative``
    prompt lookup, suffix   copy from the request itself
    an n-gram table         counted on the spot from the target's answers to held-out prompts
    early exit              the target's own first layers
    methods that are named  with each draft that fits them

Suffix decoding is tuned without its memory of earlier outputs: tuning decodes the same prompts
again and again, and such a memory would draft their answers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from outrider.core.errors import InvalidParameterError, OutriderError
from outrider.drafters.heads.kinds import format_of
from outrider.lab.bench.method_spec import MethodSpec
from outrider.lab.bench.plan import EMBEDDED
from outrider.lab.tune.engine_machine import EngineMachine
from outrider.lab.tune.machine import Source

LOOKUP, SUFFIX, EARLY_EXIT = "prompt-lookup", "suffix:corpus_tokens=0", "early-exit"
BUDGETS = (0.05, 0.2, 0.5)
"""Divergence budgets of ``mentored``, in nats, where only a metric assesses the outputs."""
LONGEST = 8
"""The longest chain that is considered, unless the user says another."""

BuildTable = Callable[[Path, Iterable[Sequence[int]], int], object]
"""Counts documents of token ids into an n-gram file; the number is that of the vocabulary."""


def candidates(
    machine: EngineMachine,
    drafts: Sequence[str],
    methods: Sequence[str] = (),
    *,
    longest: int = LONGEST,
    divergence_budget: float | None = None,
    has_metric: bool = False,
    ngram_file: Path | None = None,
    errors: dict[str, str] | None = None,
) -> list[Source]:
    """The sources to tune, the most promising first.

    Args:
        machine: with the target.
        drafts: draft models and heads.
        methods: if there are any, these alone; otherwise everything that works.
        longest: the longest chain to consider.
        divergence_budget: see :class:`EngineMachine`; allows ``mentored``.
        has_metric: whether the machine compares the outputs of lossy sources, which allows them.
        ngram_file: a table that was counted on the spot; None without one.
        errors: where sources that do not work with the target are noted; without it, their errors
            are raised.

    Raises:
        InvalidParameterError: a lossy method without a divergence budget or a metric; a method with
            a policy of its own for the draft length; suffix decoding with a memory.
    """
    found = []
    budgets: Sequence[float] = BUDGETS if has_metric else ()
    if divergence_budget is not None:
        budgets = [divergence_budget]
    rows = _rows(machine, drafts, methods, budgets, ngram_file)
    for name, method, draft in _told_apart(rows):
        try:
            found.append(machine.source(name, method, draft, longest))
        except OutriderError as error:
            if errors is None:
                raise
            errors[name] = str(error)
    return found


def count_answers(
    machine: EngineMachine,
    file: Path,
    build: BuildTable,
    *,
    max_new_tokens: int,
    seed: int = 0,
    seconds: float = 30.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Path | None:
    """Counts the target's answers to the held-out prompts into an n-gram file.

    Args:
        machine: with held-out prompts.
        file: to write.
        build: counts.
        max_new_tokens: of each answer.
        seed: of the sampling.
        seconds: after which no further answer is decoded.
        clock: in seconds.

    Returns:
        The file; None without held-out prompts.
    """
    if not machine.held_out:
        return None
    answers = list(_until(machine.outputs(max_new_tokens, seed), clock() + seconds, clock))
    build(file, answers, machine.engines.target.num_tokens)
    return file


def _rows(
    machine: EngineMachine,
    drafts: Sequence[str],
    methods: Sequence[str],
    budgets: Sequence[float],
    ngram_file: Path | None,
) -> Iterator[tuple[str, str, str | None]]:
    """Name, method and draft of each candidate."""
    if methods:
        for text in methods:
            yield from _of_method(machine, MethodSpec.parse(text), drafts, bool(budgets))
        return
    for draft in drafts:
        head = format_of(draft)
        if head is not None:
            yield f"the head {_short(draft)}", head.method, draft
            continue
        yield f"the draft {_short(draft)}", "speculative", draft
        for budget in budgets:
            amount = "" if len(budgets) == 1 else f" {budget:g}"
            method = f"mentored:budget={budget:g}"
            if not machine.is_lossless(MethodSpec.parse(method)):
                yield f"mentored{amount} with the draft {_short(draft)}", method, draft
    yield "prompt lookup", LOOKUP, None
    yield "suffix decoding", SUFFIX, None
    if ngram_file is not None:
        yield "the n-gram table", f"ngram:file={ngram_file}", None
    if machine.engines.target.decoder_prompt is None:
        yield "early exit", EARLY_EXIT, None


def _told_apart(
    rows: Iterable[tuple[str, str, str | None]],
) -> Iterator[tuple[str, str, str | None]]:
    """The candidates without repetitions. Where two have the same name, such as drafts in folders
    ``a/best`` and ``b/best``, the names get the whole paths: results are kept by name."""
    different = list(dict.fromkeys(rows))
    number = Counter(name for name, _, _ in different)
    for name, method, draft in different:
        yield (name if number[name] == 1 else f"{name} ({draft})"), method, draft


def _of_method(
    machine: EngineMachine,
    spec: MethodSpec,
    drafts: Sequence[str],
    allows_lossy: bool,
) -> Iterator[tuple[str, str, str | None]]:
    if not allows_lossy and not machine.is_lossless(spec):
        raise InvalidParameterError(
            f"method {str(spec)!r} changes the distribution of the output, and tuning for speed "
            f"alone would always prefer such a method: pass a divergence budget, in nats per "
            f"token, or a metric of quality"
        )
    spec = _without_memory(spec)
    text = str(spec)
    if not spec.drafts:
        return  # plain decoding is measured anyway
    if spec.draft_confidence or spec.draft_length != "fixed":
        raise InvalidParameterError(
            f"method {text!r}: tuning chooses the draft lengths itself, and the configuration does "
            f"not keep draft_confidence and draft_length: leave them out"
        )
    if not (spec.method.needs_draft or spec.method.needs_head):
        yield text, text, None
        return
    kind = spec.method.needs_head
    given = [spec.draft] if spec.draft is not None else list(drafts)
    fitting = [each for each in given if _kind(each) == kind]
    if not fitting:
        what = f"a head of kind {kind!r}" if kind else "a draft model"
        raise InvalidParameterError(
            f"method {text!r} needs {what}, and no draft is one: name it with the drafts"
        )
    for draft in fitting:
        yield f"{text} with {_short(draft)}", text, draft


def _without_memory(spec: MethodSpec) -> MethodSpec:
    """Suffix decoding without its memory of earlier outputs; other methods as they are."""
    if spec.name != "suffix" or spec.options.get("corpus_tokens") == 0:
        return spec
    if "corpus_tokens" in spec.options:
        raise InvalidParameterError(
            f"method {str(spec)!r}: tuning decodes the same prompts again and again, so that a "
            f"memory of earlier outputs would draft their answers: write corpus_tokens=0"
        )
    return replace(spec, options={**spec.options, "corpus_tokens": 0})


def _kind(draft: str) -> str | None:
    head = format_of(draft)
    return None if head is None else head.kind


def _short(draft: str) -> str:
    """What a person calls a draft: the last part of a folder's path."""
    return draft if draft.startswith(EMBEDDED) else Path(draft).name or draft


def _until(
    outputs: Iterable[list[int]], end: float, clock: Callable[[], float]
) -> Iterator[list[int]]:
    for each in outputs:
        yield each
        if clock() > end:
            return
