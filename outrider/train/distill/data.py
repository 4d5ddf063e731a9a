"""Makes what a run trains on, and keeps it in a cache that several runs may share.

Every folder of the cache is named by a hash of what its contents depend on:

    prompts/         target, number, seed             messages that the target wrote
    answers/         target, prompts, temperatures    the target's answers
    probabilities/   target, samples, k, temperature  its distributions
    held_out/        target, prompts, temperatures    its answers to held-out prompts
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider.engine.warming import warm_up
from outrider.runtime import HFModel
from outrider.runtime.hf.fingerprint import fingerprint
from outrider.train.distill.answers import ground_truth, plain_engine, target_answers
from outrider.train.distill.packing import packs
from outrider.train.distill.prompts import Prompt, Reader, distinct, split
from outrider.train.distill.sample import Sample
from outrider.train.distill.scoring import Scorer
from outrider.train.distill.self_prompts import write_prompts
from outrider.train.distill.settings import (
    CROSS_ENTROPY,
    DRAFT,
    GROUND_TRUTH,
    REPLAY,
    TARGET,
    Distillation,
)
from outrider.train.distill.sources import DraftSamples, FixedRows, RowSource, StepRows
from outrider.train.distill.store import Dataset, folder_for


class Preparation:
    """The prompts of a run, and the rows made of them.

    Args:
        run: what to do.
        target: the target.
        draft: the model that is trained.
        console: for progress.

    Attributes:
        held_out: prompts to measure acceptance on.
        prompts: prompts to train on.
        width: entries of the vocabulary that both models have.
        length: most tokens of a sample: those of a row, as far as both contexts go.
        description: of the data, for the model card.
    """

    def __init__(
        self, run: Distillation, target: HFModel, draft: PreTrainedModel, console: Console
    ) -> None:
        assert target.tokenizer is not None
        self.run, self.target, self.draft, self.console = run, target, draft, console
        self._reported: dict[str, int] = {}
        self.tokenizer: PreTrainedTokenizerBase = target.tokenizer
        self.target_name = _name(run.target)
        self.target_fingerprint = fingerprint(target.module)
        self.cache = run.cache or run.out / "cache"
        self.held_out_folder = self.cache / "held_out" / self.target_fingerprint[:16]
        self.engine = plain_engine(target, run.batch_size)
        warm_up(self.engine)
        config = draft.config.get_text_config()
        self.width = min(target.num_tokens, config.vocab_size)
        context = getattr(config, "max_position_embeddings", None) or target.limit
        self.length = min(run.length, target.limit, context)
        self.answering = replace(run.answering, length=self.length)
        train, held_out = split(self._all_prompts())
        self.prompts = train[: run.data.max_prompts]
        self.held_out = held_out[: run.measuring.prompts]
        self.fingerprint = _hash_of(str(prompt.tokens) for prompt in self.prompts)
        self.description = f"{len(self.prompts):,} prompts; {_shares(run.data.mixture)}"
        console.print(
            f"{len(self.prompts):,} prompts to train on, {len(self.held_out):,} to measure on",
            highlight=False,
        )

    def rows(self) -> StepRows:
        """The rows of each step."""
        run, capacity = self.run, self._capacity()
        sources: dict[str, tuple[RowSource, float]] = {}
        for kind, share in run.data.mixture.items():
            source: RowSource
            if kind in (DRAFT, REPLAY):
                source = self._draft_samples(kind, capacity)
            else:
                dataset = self._dataset(kind)
                self.description += f"; {kind}: {dataset.num_positions:,} tokens"
                source = FixedRows(dataset, capacity, run.seed)
            sources[kind] = (source, share)
        return StepRows(sources, run.rows)

    @property
    def needs_cells(self) -> bool:
        """Whether the target's distributions are computed before training."""
        return self.run.num_cached > 0 and self.run.divergence != CROSS_ENTROPY

    def _scorer(self) -> Scorer:
        run = self.run
        return Scorer(self.target.module, run.num_cached, run.temperature, self.width, run.length)

    def _capacity(self) -> int:
        """Tokens of a packed row; 0 where a model cannot keep packed samples apart."""
        models = [self.draft]
        if not self.needs_cells and self.run.divergence != CROSS_ENTROPY:
            models.append(self.target.module)
        if all(packs(model) for model in models):
            return self.run.length
        self.console.print(
            "packed samples would see each other in this model: one sample per row", highlight=False
        )
        return 0

    def _all_prompts(self) -> list[Prompt]:
        run, found = self.run, []
        reader = Reader(
            self.tokenizer,
            self.target.name,
            run.data.as_text,
            window=self.length,
            prompt_tokens=run.data.prompt_tokens,
        )
        if run.data.prompts is not None:
            found += reader.read(run.data.prompts)
        if num := run.data.self_prompts:
            folder = folder_for(
                self.cache / "prompts", target=self.target_fingerprint, seed=run.seed, num=num
            )
            messages = write_prompts(self.engine, num, run.seed, folder, self._report)
            found += [reader.encode(message) for message in messages]
        return distinct(found)

    def _dataset(self, kind: str) -> Dataset:
        """Fixed samples with their cells."""
        run = self.run
        if kind == GROUND_TRUTH:
            samples = ground_truth(self.prompts, self.length)
        else:
            assert kind == TARGET
            folder = folder_for(
                self.cache / "answers",
                target=self.target_fingerprint,
                prompts=self.fingerprint,
                how=self.answering,
            )
            samples = target_answers(
                self.engine, self.prompts, self.answering, folder, self._report
            )
        if not self.needs_cells:
            return Dataset(samples, None)
        folder = folder_for(
            self.cache / "probabilities",
            target=self.target_fingerprint,
            samples=_hash_of(str((sample.tokens, sample.first)) for sample in samples),
            k=run.num_cached,
            temperature=run.temperature,
            width=self.width,
        )
        return self._scorer().cached(samples, folder, self._report)

    def _draft_samples(self, kind: str, capacity: int) -> DraftSamples:
        run = self.run

        def as_they_are(samples: Sequence[Sample]) -> list[Sample]:
            return list(samples)

        return DraftSamples(
            plain_engine(HFModel(self.draft, self.tokenizer, "the draft"), run.batch_size),
            self.prompts,
            self.answering,
            self._scorer().scored if self.needs_cells else as_they_are,
            every=run.data.refresh_every,
            per_refresh=run.data.refresh_prompts,
            buffer=run.data.replay_samples if kind == REPLAY else run.data.refresh_prompts,
            capacity=capacity,
        )

    def _report(self, what: str, done: int, total: int) -> None:
        """Prints a line for every tenth of the work."""
        tenths = 10 * done // total
        if self._reported.get(what) != tenths:
            self._reported[what] = tenths
            self.console.print(f"{what}: {done:,} of {total:,}", highlight=False)


def _name(target: str | Path | HFModel) -> str:
    """How the model card calls the target: a folder by its name."""
    if isinstance(target, HFModel):
        return target.name
    return Path(target).resolve().name if Path(target).is_dir() else str(target)


def _shares(mixture: dict[str, float]) -> str:
    if len(mixture) == 1:
        return f"data: {next(iter(mixture))}"
    return "data: " + ", ".join(f"{share:.0%} {kind}" for kind, share in mixture.items())


def _hash_of(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part}\n".encode())
    return digest.hexdigest()
