"""Runs the whole profile of an engine on one prompt.

The method, plain decoding, and the method with recording continue the same prompt alternately. The
first round, which includes the admission, is never counted. Then each model's forward passes are
timed alone, after half of the output. The memory bandwidth is measured before and after.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outrider.engine import Engine
from outrider.engine.plain import plain_engine
from outrider.lab.profile.bandwidth import LARGE, Bandwidth, last_level_cache, read_bandwidth
from outrider.lab.profile.formula import SpeedUp
from outrider.lab.profile.instrument import ENGINE, TARGET, tracks
from outrider.lab.profile.model import ModelPasses
from outrider.lab.profile.phases import Phases
from outrider.lab.profile.rounds import InterleavedRuns, interleave
from outrider.lab.profile.spans import Span, SpanRecorder, span_cost
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.sampling import Sampling

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Profile:
    """The result of a profile.

    Attributes:
        document: all numbers as a JSON document, in seconds, bytes, and bytes per second.
        spans: of the last recorded run, prefill included.
        names: display names of the spans' tracks.
    """

    document: dict[str, Any]
    spans: list[Span]
    names: dict[str, str]


def profile(
    engine: Engine,
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    rounds: int = 48,
    repeats: int = 3,
    memory_bytes: int | None = None,
    progress: Progress = lambda stage: None,
) -> Profile:
    """Measures where the time of a round goes, and how fast it could be.

    Args:
        engine: with a batch size of one; warmed up here.
        prompt: text or token ids.
        sampling: its stop conditions and limits are ignored.
        rounds: number to time and to record in each repeat, at least 1; fewer if the context
            fills up.
        repeats: number of runs of each kind.
        memory_bytes: working set of the bandwidth measurement; None takes one far larger than the
            last-level cache.
        progress: called with a description of each stage before it starts.

    Raises:
        PromptError: the context has no room for two rounds after the prompt.
    """
    sampling = replace(sampling, stop=(), ignore_eos=True)
    prompt_ids = engine.encode(prompt)
    device = engine.target.device
    progress("memory bandwidth")
    cache_size = last_level_cache(device)
    memory_bytes = memory_bytes or max(LARGE, 8 * (cache_size or 0))
    before = read_bandwidth(device, memory_bytes)
    plain = plain_engine(engine, lambda stage, _: progress(stage))
    progress("rounds")
    new_recorder = partial(SpanRecorder, wait=_wait(device))
    runs = interleave(engine, plain, prompt_ids, sampling, rounds, repeats, new_recorder)
    phases = Phases.of(span for recorder in runs.recorders for span in _steady(recorder))
    output = runs.method[0].token_ids
    context = [*(engine.target.decoder_prompt or prompt_ids), *output[: len(output) // 2]]
    source = None if engine.target.decoder_prompt is None else prompt_ids
    models = {}
    for track, model in tracks(engine).items():
        progress(f"forward passes of the {track}")
        models[track] = ModelPasses.measure(model, context, source, phases.passes.get(track))
    progress("memory bandwidth, again")
    memory = _combined(before, read_bandwidth(device, memory_bytes))
    document = {
        "run": _run(engine, sampling, prompt_ids, runs),
        "phases": phases.as_dict(),
        "profiler": _profiler(phases, runs),
        "memory": {**memory.as_dict(), "last_level_cache": cache_size},
        "models": {track: model.as_dict(memory, cache_size) for track, model in models.items()},
        "speedup": _speedup(engine, runs, phases, models) if runs.plain else None,
    }
    names = {ENGINE: f"engine, method {engine.method.name}"}
    names |= {t: f"{t}: {type(m.module).__name__}" for t, m in tracks(engine).items()}
    return Profile(document, runs.recorders[-1].spans, names)


def _steady(recorder: SpanRecorder) -> list[Span]:
    """The spans without those of the first round, in which KV buffers are allocated."""
    first = min(
        (span for span in recorder.spans if span.name == "round"), key=lambda span: span.begin
    )
    return [span for span in recorder.spans if span.inside("round") is not first]


def _run(
    engine: Engine, sampling: Sampling, prompt: Sequence[int], runs: InterleavedRuns
) -> dict[str, Any]:
    timed, stats = runs.method, runs.method[0].stats
    plain_speeds = [run.speed for run in runs.plain]
    return {
        "method": engine.method.name,
        "num_speculative_tokens": engine.num_speculative_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "prompt_tokens": len(prompt),
        "rounds": timed[0].rounds,
        "repeats": len(timed),
        "tokens": timed[0].tokens,
        "acceptance_length": stats.acceptance_length,
        "acceptance_rate": stats.acceptance_rate,
        "alpha": stats.alpha,
        "drafted_per_round": stats.drafted / stats.rounds,
        "round_seconds": statistics.median(run.seconds / run.rounds for run in timed),
        "tokens_per_second": statistics.median(run.speed for run in timed),
        "plain_tokens_per_second": statistics.median(plain_speeds) if plain_speeds else None,
    }


def _profiler(phases: Phases, runs: InterleavedRuns) -> dict[str, float]:
    """The cost of recording."""
    unrecorded = statistics.mean(run.seconds / run.rounds for run in runs.method)
    cost = span_cost()
    return {
        "span_seconds": cost,
        "spans_share": cost * phases.num_spans / phases.seconds,
        "recorded_over_unrecorded": phases.seconds / unrecorded,
    }


def _speedup(
    engine: Engine, runs: InterleavedRuns, phases: Phases, models: dict[str, ModelPasses]
) -> dict[str, Any]:
    stats, target = runs.method[0].stats, models[TARGET]
    draft, c = 0.0, 0.0
    for track, model in models.items():
        if track != TARGET and model.passes is not None:
            each = model.relative(model.passes.tokens, target)
            draft, c = draft + model.passes.count * each, c or each
    passes = phases.passes[TARGET]
    beta = target.relative(passes.tokens, target)
    if isinstance(engine.target, EarlyExit):  # only in rounds do its passes skip layers
        beta = passes.seconds / target.times[1]
    ratios = [a.speed / b.speed for a, b in zip(runs.method, runs.plain, strict=True)]
    return SpeedUp(
        statistics.median(ratios),
        stats.alpha,
        stats.drafted / stats.rounds,
        stats.acceptance_length,
        draft,
        c,
        beta,
        phases.chain,
    ).as_dict() | {"lowest": min(ratios), "highest": max(ratios)}


def _combined(first: Bandwidth, last: Bandwidth) -> Bandwidth:
    """Two measurements of the bandwidth as one."""
    return Bandwidth(
        first.num_bytes,
        statistics.mean((first.median, last.median)),
        min(first.lowest, last.lowest),
        max(first.highest, last.highest),
        statistics.mean((first.matrix_vector, last.matrix_vector)),
    )


def _wait(device: torch.device) -> Callable[[], None] | None:
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
