"""The whole profile of an engine on one prompt, as a JSON document.

The method, plain decoding, and the method recorded continue the same prompt in turns; the round
that an admission falls into is never counted. Then passes of each model alone, behind half of the
text that was written. The memory is timed first and last.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from outrider.engine import Engine
from outrider.lab.profile.bandwidth import LARGE, Bandwidth, last_level_cache, read_bandwidth
from outrider.lab.profile.formula import SpeedUp
from outrider.lab.profile.instrument import ENGINE, TARGET, tracks
from outrider.lab.profile.model import ModelPasses
from outrider.lab.profile.phases import Phases
from outrider.lab.profile.rounds import Turns, take_turns
from outrider.lab.profile.spans import Recorder, Span, span_cost
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.sampling import Sampling

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Profile:
    """What was found.

    Attributes:
        document: all numbers, for JSON; seconds, bytes, and bytes per second.
        spans: of the rounds recorded last, prefill included.
        names: what to call the tracks of the spans.
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
    """Measures where the time of a round goes, and what it could be.

    Args:
        engine: with a batch of one; warmed up here.
        prompt: what to continue.
        sampling: its stops and limits are ignored.
        rounds: how many to time and to record in each repeat; at least 1. A full context ends
            them early.
        repeats: how often.
        memory_bytes: working set by which the memory is timed; None takes one far larger than the
            last-level cache.
        progress: is told what is going on.

    Raises:
        PromptError: a prompt that leaves no room for two rounds.
    """
    sampling = replace(sampling, stop=(), ignore_eos=True)
    prompt_ids = engine.encode(prompt)
    device = engine.target.device
    progress("memory bandwidth")
    cache_size = last_level_cache(device)
    memory_bytes = memory_bytes or max(LARGE, 8 * (cache_size or 0))
    before = read_bandwidth(device, memory_bytes)
    progress("rounds")
    turns = take_turns(
        engine, prompt_ids, sampling, rounds, repeats, lambda: Recorder(wait=_wait(device))
    )
    phases = Phases.of(span for recorder in turns.recorders for span in _settled(recorder))
    written = turns.method[0].token_ids
    middle = [*(engine.target.decoder_prompt or prompt_ids), *written[: len(written) // 2]]
    source = None if engine.target.decoder_prompt is None else prompt_ids
    models = {}
    for track, model in tracks(engine).items():
        progress(f"passes of the {track}")
        models[track] = ModelPasses.measure(model, middle, source, phases.passes.get(track))
    progress("memory bandwidth, again")
    memory = _both(before, read_bandwidth(device, memory_bytes))
    document = {
        "run": _run(engine, sampling, prompt_ids, turns),
        "phases": phases.as_dict(),
        "profiler": _profiler(phases, turns),
        "memory": {**memory.as_dict(), "last_level_cache": cache_size},
        "models": {track: model.as_dict(memory, cache_size) for track, model in models.items()},
        "speedup": _speedup(engine, turns, phases, models) if turns.plain else None,
    }
    names = {ENGINE: f"engine, method {engine.method.name}"}
    names |= {t: f"{t}: {type(m.module).__name__}" for t, m in tracks(engine).items()}
    return Profile(document, turns.recorders[-1].spans, names)


def _settled(recorder: Recorder) -> list[Span]:
    """All but the first round, before which KV buffers were allocated."""
    first = min(
        (span for span in recorder.spans if span.name == "round"), key=lambda span: span.begin
    )
    return [span for span in recorder.spans if span.inside("round") is not first]


def _run(engine: Engine, sampling: Sampling, prompt: Sequence[int], turns: Turns) -> dict[str, Any]:
    timed, stats = turns.method, turns.method[0].stats
    plain_speeds = [run.speed for run in turns.plain]
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


def _profiler(phases: Phases, turns: Turns) -> dict[str, float]:
    """What recording cost."""
    unrecorded = statistics.mean(run.seconds / run.rounds for run in turns.method)
    cost = span_cost()
    return {
        "span_seconds": cost,
        "spans_share": cost * phases.num_spans / phases.seconds,
        "recorded_over_unrecorded": phases.seconds / unrecorded,
    }


def _speedup(
    engine: Engine, turns: Turns, phases: Phases, models: dict[str, ModelPasses]
) -> dict[str, Any]:
    stats, target = turns.method[0].stats, models[TARGET]
    draft, c = 0.0, 0.0
    for track, model in models.items():
        if track != TARGET and model.passes is not None:
            each = model.relative(model.passes.tokens, target)
            draft, c = draft + model.passes.count * each, c or each
    passes = phases.passes[TARGET]
    beta = target.relative(passes.tokens, target)
    if isinstance(engine.target, EarlyExit):  # alone, it computes all layers
        beta = passes.seconds / target.times[1]
    ratios = [a.speed / b.speed for a, b in zip(turns.method, turns.plain, strict=True)]
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


def _both(first: Bandwidth, last: Bandwidth) -> Bandwidth:
    """Two measurements of the same as one."""
    return Bandwidth(
        first.num_bytes,
        statistics.mean((first.median, last.median)),
        min(first.lowest, last.lowest),
        max(first.highest, last.highest),
        statistics.mean((first.matrix_vector, last.matrix_vector)),
    )


def _wait(device: torch.device) -> Callable[[], None] | None:
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
