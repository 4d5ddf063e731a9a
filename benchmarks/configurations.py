"""The compared configurations: transformers and Outrider with the same weights and one interface.

A configuration continues a list of prompts and returns the number of tokens that it emitted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from outrider import Engine, Sampling, Stats
from outrider.runtime import HFModel


@dataclass(frozen=True)
class Run:
    """The number of tokens emitted by one call, and the engine's statistics if it has any."""

    tokens: int
    stats: Stats | None = None


class Configuration(Protocol):
    """An engine with a method and its settings."""

    @property
    def name(self) -> str:
        """What tables call it."""

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> Run:
        """Continues all prompts by the same number of tokens."""


@dataclass(frozen=True)
class Transformers:
    """``model.generate``, plain or assisted, one prompt at a time (assisted accepts no batches)."""

    name: str
    target: HFModel
    draft: HFModel | None
    num_speculative_tokens: int
    temperature: float
    max_new_tokens: int

    def __post_init__(self) -> None:
        if self.draft is not None:
            config = self.draft.module.generation_config
            config.num_assistant_tokens = self.num_speculative_tokens
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> Run:
        tokens = 0
        for number, prompt in enumerate(prompts):
            torch.manual_seed(1000 * seed + number)
            if self.draft is not None:  # generate() overwrites the number
                self.draft.module.generation_config.num_assistant_tokens = (
                    self.num_speculative_tokens
                )
            input_ids = torch.tensor([list(prompt)], device=self.target.device)
            sampled = {"temperature": self.temperature} if self.temperature else {}
            output = self.target.module.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                max_new_tokens=self.max_new_tokens,
                eos_token_id=None,
                pad_token_id=0,
                do_sample=self.temperature > 0,
                top_k=0 if self.temperature else None,
                top_p=1.0 if self.temperature else None,
                assistant_model=None if self.draft is None else self.draft.module,
                **sampled,
            )
            tokens += output.shape[1] - len(prompt)
        return Run(tokens)


@dataclass(frozen=True)
class Outrider:
    """An Outrider engine, on prompts one after the other or as a batch."""

    name: str
    engine: Engine
    temperature: float
    max_new_tokens: int
    batched: bool = False

    def __call__(self, prompts: Sequence[Sequence[int]], seed: int) -> Run:
        sampling = Sampling(
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            seed=seed,
            ignore_eos=True,
        )
        groups = [list(prompts)] if self.batched else [[prompt] for prompt in prompts]
        stats = Stats.total(self.engine.generate(group, sampling).stats for group in groups)
        return Run(stats.emitted, stats)
