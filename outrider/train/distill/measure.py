"""Measured acceptance of a draft on held-out prompts.

α = E[Σ_x min(p(x), q(x))] is computed from both full distributions at every position of the
target's own answers at the same temperature, where speculative decoding uses the draft; at
temperature 0 it is how often the argmaxes agree.  The acceptance length is that of the engine
running speculative decoding on the same prompts: emitted tokens per forward pass of the target.

The draft is measured in the precision in which it is saved.

Shapes: N positions of an answer, V vocabulary.  `p` target, `q` draft.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.sampling import Sampling
from outrider.train.distill.answers import Answering, plain_engine, target_answers
from outrider.train.distill.packing import logits_of, pack
from outrider.train.distill.prompts import Prompt
from outrider.train.distill.sample import Sample
from outrider.train.distill.store import folder_for
from outrider.train.evaluate import acceptance


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of a draft at one temperature.

    Attributes:
        temperature: of target and draft.
        alpha: mean of Σ min(p, q) over positions.
        acceptance_length: emitted tokens per forward pass of the target.
        acceptance_rate: accepted over drafted tokens.
        sums: Σ min(p, q) of each answer, summed over its positions.
        counts: positions of each answer.
    """

    temperature: float
    alpha: float
    acceptance_length: float
    acceptance_rate: float
    sums: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Measurement:
    """The acceptance of a draft after a step.

    Attributes:
        step: steps of training done.
        tokens: of answers that were trained on in these steps, repetitions included.
        at: the acceptance at each temperature.
    """

    step: int
    tokens: int
    at: tuple[Acceptance, ...]

    @property
    def score(self) -> float:
        """The mean α over temperatures, by which checkpoints are compared."""
        return statistics.fmean(each.alpha for each in self.at)


class Meter:
    """Measures drafts on held-out prompts, whose answers the target gives once.

    Args:
        target: the target.
        prompts: held out.
        how: temperatures, lengths and seed of the answers.
        num_speculative_tokens: γ of the speculative decoding.
        batch_size: prompts decoded at the same time.
        folder: cache of the answers of this target.
    """

    def __init__(
        self,
        target: HFModel,
        prompts: Sequence[Prompt],
        how: Answering,
        *,
        num_speculative_tokens: int,
        batch_size: int,
        folder: Path,
    ) -> None:
        self.target, self.how = target, how
        self.num_speculative_tokens, self.batch_size = num_speculative_tokens, batch_size
        engine = plain_engine(target, batch_size)
        self.answers: dict[float, list[Sample]] = {}
        for temperature in how.temperatures:
            at = replace(how, temperatures=(temperature,))
            cache = folder_for(folder, held_out=[prompt.tokens for prompt in prompts], how=at)
            self.answers[temperature] = target_answers(engine, prompts, at, cache)

    def __call__(self, draft: HFModel, step: int, tokens: int) -> Measurement:
        """The acceptance of a draft after so many steps and tokens of training."""
        engine = Engine(
            self.target,
            draft,
            METHODS["speculative"],
            num_speculative_tokens=self.num_speculative_tokens,
            max_batch_size=self.batch_size,
            measure=False,
            generation_config=False,
        )
        return Measurement(
            step, tokens, tuple(self._at(draft.module, engine, each) for each in self.answers)
        )

    def _at(self, draft: PreTrainedModel, engine: Engine, temperature: float) -> Acceptance:
        answers = self.answers[temperature]
        target = self.target.module
        sums = tuple(overlap(target, draft, answer, temperature) for answer in answers)
        counts = tuple(answer.num_positions for answer in answers)
        sampling = Sampling(
            temperature=temperature, max_new_tokens=self.how.max_tokens, seed=self.how.seed
        )
        prompts = [answer.tokens[: answer.first] for answer in answers]
        stats = engine.generate(prompts, sampling, request_numbers=range(len(prompts))).stats
        return Acceptance(
            temperature,
            sum(sums) / sum(counts),
            stats.acceptance_length,
            stats.acceptance_rate,
            sums,
            counts,
        )


@torch.inference_mode()
def overlap(
    target: PreTrainedModel, draft: PreTrainedModel, answer: Sample, temperature: float
) -> float:
    """Σ_x min(p(x), q(x)) summed over the positions of an answer."""
    row = pack([answer]).to(target.device)
    p_logits_NV, q_logits_NV = logits_of(target, row), logits_of(draft, row)
    width = min(p_logits_NV.shape[-1], q_logits_NV.shape[-1])
    alpha_N = acceptance(p_logits_NV[:, :width], q_logits_NV[:, :width], temperature)
    return float(alpha_N.sum())
