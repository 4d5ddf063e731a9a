"""Outrider as a peer; a row is the name of a method, optionally followed by a format of blocks,
such as `` q8_0``, and by `` compiled``.

With blocks, target and draft are the GGUF files that llama.cpp reads, whose blocks are kept.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

import outrider
from benchmarks.peer_workers.protocol import BLOCKS, SEED, Answer, Job, Ready, serve, watch
from outrider import Engine, Sampling
from outrider.runtime import HFModel


class Outrider:
    """A worker with one engine per row, over one copy of the pair for all rows that run alike."""

    def __init__(self) -> None:
        self.pairs: dict[tuple[str, ...], tuple[HFModel, HFModel]] = {}
        self.engines: dict[str, Engine] = {}
        self.sampling = Sampling(temperature=0.0)

    def prepare(self, row: str, job: Job) -> Ready:
        torch.set_num_threads(job.threads)
        method, *how = row.split()
        with watch() as exporting:
            found = folders(job, how)
        with watch() as spent:
            target, draft = self._pair(job, tuple(how), *found)
            drafts = {"speculative": draft, "eagle3": job.head}
            self.engines[row] = outrider.load(
                target, drafts.get(method), method, job.num_speculative_tokens
            )
            self.sampling = Sampling(temperature=job.temperature, seed=SEED, ignore_eos=True)
        return Ready(
            precision=blocks(how) or str(target.dtype).removeprefix("torch."),
            export_seconds=exporting.seconds,
            threads=torch.get_num_threads(),
            version=f"outrider {outrider.__version__}, torch {torch.__version__}",
            seconds=spent.seconds,
        )

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        sampling = replace(self.sampling, max_new_tokens=num_tokens)
        with watch() as spent:
            (result,) = self.engines[row].generate([prompt], sampling)
        stats = result.stats
        return Answer(list(result.token_ids), spent.seconds, stats.drafted, stats.accepted)

    def close(self) -> None:
        self.engines.clear()

    def _pair(
        self, job: Job, how: tuple[str, ...], target: str, draft: str
    ) -> tuple[HFModel, HFModel]:
        """Target and draft, eager or compiled; later engines share them. A pair of the same model
        twice has no draft, and none is compiled."""
        if how not in self.pairs:
            alone = target == draft
            keep = None if blocks(how) is None else "keep"
            engine = outrider.load(
                target,
                None if alone else draft,
                "plain" if alone else None,
                None if alone else job.num_speculative_tokens,
                dtype=job.dtype,
                device="cpu",
                compile="auto" if "compiled" in how else "off",
                quantize_target=keep,
                quantize_draft=None if alone else keep,
            )
            draft_model = engine.target if engine.draft is None else engine.draft
            self.pairs[how] = engine.target, draft_model
        return self.pairs[how]


def blocks(how: Sequence[str]) -> str | None:
    """The format of blocks among the words of a row after its method, if there is one."""
    return next((word for word in how if word in BLOCKS), None)


def folders(job: Job, how: Sequence[str]) -> tuple[str, str]:
    """The folders of target and draft, or with blocks their GGUF files."""
    kind = blocks(how)
    if kind is None:
        return job.target, job.draft
    from benchmarks.peer_workers.gguf_export import exported  # needs the package gguf

    return str(exported(job, job.target, kind)), str(exported(job, job.draft, kind))


if __name__ == "__main__":
    serve(Outrider())
