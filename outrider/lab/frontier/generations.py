"""Whole generations: the speed of each setting, and the perplexity of its outputs under the target.

Every setting generates twice. For quality, it generates in batches, with the divergence measured.
For speed, it generates one sequence at a time without measuring it, interleaved with the others.
"""

import math
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine import Engine, Result, Stats
from outrider.engine.warming import warm_up
from outrider.lab.frontier.families import SETTINGS, Setting
from outrider.methods import find_method
from outrider.runtime import HFModel
from outrider.sampling import Sampling

_BATCH = 16


@dataclass
class Series:
    """The engines of one setting, and everything that they generated.

    Attributes:
        setting: the method and its options.
        timed: the engine for speed, which generates one sequence at a time.
        measured: the engine for quality, which generates batches and measures the divergence.
        tokens_per_second: of each timed repeat, prefill included.
        results: all outputs of both engines.
        stats: of the outputs for quality.
    """

    setting: Setting
    timed: Engine
    measured: Engine
    tokens_per_second: list[float] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)

    @classmethod
    def of(
        cls, setting: Setting, target: HFModel, draft: HFModel, num_speculative_tokens: int
    ) -> "Series":
        """Builds both engines and warms them up."""

        def engine(batch: int, measure: bool) -> Engine:
            built = Engine(
                target,
                draft,
                find_method(setting.method),
                num_speculative_tokens=num_speculative_tokens,
                max_batch_size=batch,
                options=setting.options,
                measure=measure,
                generation_config=False,
            )
            warm_up(built)
            return built

        return cls(setting, engine(1, False), engine(_BATCH, True))

    def measure(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Generates one output per prompt for quality."""
        results = self.measured.generate(list(prompts), sampling)
        self.results += results
        self.stats = results.stats

    def time(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Times one repeat. Results are on the host when ``generate`` returns."""
        began = time.perf_counter()
        results = [self.timed.generate([prompt], sampling)[0] for prompt in prompts]
        seconds = time.perf_counter() - began
        self.tokens_per_second.append(sum(len(r.token_ids) for r in results) / seconds)
        self.results += results

    def as_dict(self, plain: Sequence[float]) -> dict[str, Any]:
        """The results as a JSON document.

        Args:
            plain: tokens per second of plain decoding in the same repeats.
        """
        speedups = [speed / base for speed, base in zip(self.tokens_per_second, plain, strict=True)]
        return {
            "name": self.setting.name,
            "method": self.setting.method,
            "options": dict(self.setting.options),
            "lossless": self.timed.verifier.lossless,
            "tokens_per_second": _spread(self.tokens_per_second),
            "speedup": _spread(speedups),
            "perplexity": perplexity([(r.prompt_ids, r.logprobs) for r in self.results]),
            "stats": self.stats.as_dict(),
        }


def generate(
    target: HFModel,
    draft: HFModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_speculative_tokens: int,
    *,
    repeats: int,
    texts_per_prompt: int,
    settings: Sequence[Setting] = SETTINGS,
    progress: Callable[[str], None] = lambda stage: None,
) -> list[dict[str, Any]]:
    """Runs every setting on the same prompts; speed-ups are relative to the first setting.

    The batches for quality run first and warm everything up. The order of the settings rotates
    from repeat to repeat.

    Args:
        target: the target model.
        draft: the draft model.
        prompts: token ids.
        sampling: of all outputs.
        num_speculative_tokens: γ.
        repeats: timed repeats.
        texts_per_prompt: outputs per prompt for quality.
        settings: the methods, plain decoding first.
        progress: called with a description of each stage before it starts.

    Returns:
        One JSON document per setting.
    """
    sampling = replace(sampling, logprobs=0)
    series = [Series.of(setting, target, draft, num_speculative_tokens) for setting in settings]
    for one in series:
        progress(f"outputs of {one.setting.name}")
        one.measure(list(prompts) * texts_per_prompt, sampling)
    for repeat in range(repeats):
        seeded = replace(sampling, seed=(sampling.seed or 0) + 1 + repeat)
        for i in range(len(series)):
            one = series[(i + repeat) % len(series)]
            progress(f"speed of {one.setting.name}, repeat {repeat + 1} of {repeats}")
            one.time(prompts, seeded)
    return [one.as_dict(series[0].tokens_per_second) for one in series]


def perplexity(outputs: Sequence[tuple[Hashable, Sequence[float]]]) -> dict[str, float]:
    """Perplexity of several outputs.

    ``macro`` weights all outputs equally, ``micro`` all tokens. ``error`` is the standard error of
    ``macro`` on these prompts: it counts the variance between outputs of the same prompt, not that
    between prompts, which are the same for all settings. It is infinite if no prompt has two
    outputs.

    Args:
        outputs: the prompt of each output, and the log-probabilities of its tokens.
    """
    means: dict[Hashable, list[float]] = {}
    for prompt, logprobs in outputs:
        means.setdefault(prompt, []).append(statistics.fmean(logprobs))
    spreads = [statistics.variance(each) for each in means.values() if len(each) > 1]
    variance = statistics.fmean(spreads) if spreads else math.inf
    macro = math.exp(-statistics.fmean(mean for each in means.values() for mean in each))
    tokens = [logprob for _, logprobs in outputs for logprob in logprobs]
    return {
        "macro": macro,
        "micro": math.exp(-statistics.fmean(tokens)),
        "error": macro * math.sqrt(variance / len(outputs)),
        "texts": len(outputs),
        "tokens": len(tokens),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "repeats": list(values),
    }
