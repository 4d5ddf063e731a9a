"""Answers to train on: those that came with the prompts, and those that a model samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.core.errors import PromptError
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.sampling import Sampling
from outrider.train.distill.prompts import Prompt
from outrider.train.distill.sample import Sample, cut
from outrider.train.distill.store import SHARD_SAMPLES, read_samples, shard_path, write_samples

Report = Callable[[str, int, int], None]
"""Told what is being made, how much is done, and how much there is."""


@dataclass(frozen=True)
class Answering:
    """How a model answers.

    Attributes:
        temperatures: each prompt is answered once at each.
        max_tokens: most tokens of an answer.
        length: most tokens of a sample that a model reads; longer ones are cut.
        seed: with a sample's number, the key of its random numbers.
    """

    temperatures: tuple[float, ...] = (1.0,)
    max_tokens: int = 256
    length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperatures:
            raise ValueError("no temperature to answer at; give at least one")
        if self.max_tokens < 1 or self.length < 2:
            raise ValueError(
                f"answers of {self.max_tokens} tokens in rows of {self.length}: an answer needs "
                "at least 1 token, and a row 2"
            )


def plain_engine(model: HFModel, batch_size: int) -> Engine:
    """An engine that decodes a model plainly, at the temperature asked for and no other setting."""
    return Engine(
        model,
        None,
        METHODS["plain"],
        max_batch_size=batch_size,
        measure=False,
        generation_config=False,
    )


def sampled(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    how: Answering,
    temperatures: Sequence[float],
    first_number: int,
) -> list[Sample]:
    """A model's answers to some prompts; prompts that leave no room for an answer are left out.

    Args:
        engine: decodes the model.
        prompts: their tokens.
        how: see :class:`Answering`.
        temperatures: of each prompt's answer.
        first_number: the number of the first prompt's random numbers.
    """
    limit = min(how.length + 1, engine.limit)
    asked = [
        (number, tokens, temperature)
        for number, (tokens, temperature) in enumerate(zip(prompts, temperatures, strict=True))
        if 0 < len(tokens) < limit
    ]
    if not asked:
        return []
    results = engine.generate(
        [tokens for _, tokens, _ in asked],
        [
            Sampling(
                temperature=temperature,
                max_new_tokens=min(how.max_tokens, limit - len(tokens)),
                seed=how.seed,
            )
            for _, tokens, temperature in asked
        ],
        request_numbers=[first_number + number for number, _, _ in asked],
    )
    return [
        Sample(result.prompt_ids + result.token_ids, len(result.prompt_ids)) for result in results
    ]


def ground_truth(prompts: Sequence[Prompt], length: int) -> list[Sample]:
    """The answers that came with the prompts.

    Raises:
        PromptError: no prompt has one that fits.
    """
    samples = [
        sample
        for prompt in prompts
        if prompt.answer
        and (sample := cut(prompt.tokens + prompt.answer, len(prompt.tokens), length))
    ]
    if not samples:
        raise PromptError(
            f"none of {len(prompts)} prompts comes with an answer that fits into rows of {length} "
            "tokens, so there is no ground truth; give JSON lines with answers or a folder of "
            "texts, longer rows, or train on the target's answers"
        )
    return samples


def target_answers(
    engine: Engine,
    prompts: Sequence[Prompt],
    how: Answering,
    folder: Path,
    report: Report = lambda what, done, total: None,
) -> list[Sample]:
    """The target's answers, a shard at a time, going on after the shards of an earlier run.

    Raises:
        PromptError: all prompts are too long.
        DiskFullError: see ``store.py``.
    """
    asked = [(prompt.tokens, each) for prompt in prompts for each in how.temperatures]
    samples: list[Sample] = []
    for number, begin in enumerate(range(0, len(asked), SHARD_SAMPLES)):
        path = shard_path(folder, number)
        if not path.exists():
            chunk = asked[begin : begin + SHARD_SAMPLES]
            tokens, temperatures = zip(*chunk, strict=True)
            write_samples(path, sampled(engine, tokens, how, temperatures, begin))
        samples += read_samples(path)
        report("the target's answers", min(begin + SHARD_SAMPLES, len(asked)), len(asked))
    if not samples:
        raise PromptError(
            f"all {len(prompts)} prompts are too long for rows of {how.length} tokens; "
            "give shorter prompts or longer rows"
        )
    return samples
