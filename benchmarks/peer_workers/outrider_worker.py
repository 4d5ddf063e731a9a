"""Outrider as a peer; a row is the name of a method, optionally followed by `` compiled``."""

import torch

import outrider
from benchmarks.peer_workers.protocol import Answer, Job, Ready, serve, watch
from outrider import Engine, Sampling
from outrider.runtime import HFModel


class Outrider:
    """A worker with one engine per row, over an eager and a compiled copy of the pair."""

    def __init__(self) -> None:
        self.pairs: dict[bool, tuple[HFModel, HFModel]] = {}
        self.engines: dict[str, Engine] = {}

    def prepare(self, row: str, job: Job) -> Ready:
        torch.set_num_threads(job.threads)
        method, _, compiled = row.partition(" ")
        with watch() as spent:
            target, draft = self._pair(job, bool(compiled))
            self.engines[row] = outrider.load(
                target,
                draft if method == "speculative" else None,
                method,
                job.num_speculative_tokens,
            )
        return Ready(
            precision=str(target.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
            version=f"outrider {outrider.__version__}, torch {torch.__version__}",
            seconds=spent.seconds,
        )

    def generate(self, row: str, prompt: list[int], num_tokens: int) -> Answer:
        sampling = Sampling(temperature=0.0, max_new_tokens=num_tokens, ignore_eos=True)
        with watch() as spent:
            (result,) = self.engines[row].generate([prompt], sampling)
        stats = result.stats
        return Answer(list(result.token_ids), spent.seconds, stats.drafted, stats.accepted)

    def close(self) -> None:
        self.engines.clear()

    def _pair(self, job: Job, compiled: bool) -> tuple[HFModel, HFModel]:
        """Target and draft, eager or compiled; later engines share them."""
        if compiled not in self.pairs:
            engine = outrider.load(
                job.target,
                job.draft,
                num_speculative_tokens=job.num_speculative_tokens,
                dtype=job.dtype,
                device="cpu",
                compile="auto" if compiled else "off",
            )
            assert engine.draft is not None
            self.pairs[compiled] = engine.target, engine.draft
        return self.pairs[compiled]


if __name__ == "__main__":
    serve(Outrider())
