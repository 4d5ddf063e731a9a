"""Whole generations: how fast each setting is, and how probable the target finds what it wrote.

Texts are written twice over. In batches, with the divergences measured, which gives quality; and
one after the other without that, interleaved over the settings, which gives speed.
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
    """All that one setting wrote.

    Attributes:
        setting: the method and its options.
        timed: writes one text at a time.
        measured: writes batches, and works out how far the distribution strays.
        tokens_per_second: of each repeat, prefill included.
        results: all texts.
        stats: of the measured texts.
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
        def engine(batch: int, measure: bool) -> Engine:
            made = Engine(
                target,
                draft,
                find_method(setting.method),
                num_speculative_tokens=num_speculative_tokens,
                max_batch_size=batch,
                options=setting.options,
                measure=measure,
                generation_config=False,
            )
            warm_up(made)
            return made

        return cls(setting, engine(1, False), engine(_BATCH, True))

    def measure(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """A batch of texts for quality."""
        results = self.measured.generate(list(prompts), sampling)
        self.results += results
        self.stats = results.stats

    def time(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """One repeat for speed: results are on the host when a call returns."""
        began = time.perf_counter()
        results = [self.timed.generate([prompt], sampling)[0] for prompt in prompts]
        seconds = time.perf_counter() - began
        self.tokens_per_second.append(sum(len(r.token_ids) for r in results) / seconds)
        self.results += results

    def as_dict(self, plain: Sequence[float]) -> dict[str, Any]:
        """For JSON. Speed-ups are over plain decoding in the same repeat."""
        pairs = zip(self.tokens_per_second, plain, strict=True)
        speedups = [mine / theirs for mine, theirs in pairs]
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
    """Every setting on the same prompts; the first setting is the one that speed is held against.

    The order of the settings turns from repeat to repeat. The batches come first and warm
    everything up.
    """
    sampling = replace(sampling, logprobs=0)
    series = [Series.of(setting, target, draft, num_speculative_tokens) for setting in settings]
    for one in series:
        progress(f"texts by {one.setting.name}")
        one.measure(list(prompts) * texts_per_prompt, sampling)
    for repeat in range(repeats):
        seeded = replace(sampling, seed=sampling.seed + 1 + repeat)
        for place in range(len(series)):
            one = series[(place + repeat) % len(series)]
            progress(f"speed of {one.setting.name}, repeat {repeat + 1} of {repeats}")
            one.time(prompts, seeded)
    return [one.as_dict(series[0].tokens_per_second) for one in series]


def perplexity(texts: Sequence[tuple[Hashable, Sequence[float]]]) -> dict[str, float]:
    """Of texts, from the prompt and the log-probabilities of the tokens of each.

    ``macro`` gives every text the same weight, ``micro`` every token. ``error`` is the standard
    error of macro on these prompts: from one text of a prompt to the next, not between prompts,
    which are the same for all settings. It is infinite where no prompt has two texts.
    """
    means: dict[Hashable, list[float]] = {}
    for prompt, logprobs in texts:
        means.setdefault(prompt, []).append(statistics.fmean(logprobs))
    spreads = [statistics.variance(each) for each in means.values() if len(each) > 1]
    variance = statistics.fmean(spreads) if spreads else math.inf
    macro = math.exp(-statistics.fmean(mean for each in means.values() for mean in each))
    tokens = [logprob for _, logprobs in texts for logprob in logprobs]
    return {
        "macro": macro,
        "micro": math.exp(-statistics.fmean(tokens)),
        "error": macro * math.sqrt(variance / len(texts)),
        "texts": len(texts),
        "tokens": len(tokens),
    }


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "repeats": list(values),
    }
