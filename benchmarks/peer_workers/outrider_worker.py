"""Outrider as one peer among others; its rows are a method, and ``compiled`` behind it or not."""

import torch

import outrider
from benchmarks.peer_workers.protocol import Answer, Job, Ready, serve, watch
from outrider import Engine, Sampling
from outrider.models import HFModel, load_model


class Outrider:
    """Engines over one target and one draft in memory."""

    def __init__(self) -> None:
        self.models: dict[str, HFModel] = {}
        self.engines: dict[str, Engine] = {}

    def prepare(self, row: str, job: Job) -> Ready:
        torch.set_num_threads(job.threads)
        method, _, compiled = row.partition(" ")
        with watch() as spent:
            target = self._model(job.target)
            self.engines[row] = outrider.load(
                target,
                self._model(job.draft) if method == "speculative" else None,
                method,
                job.num_speculative_tokens,
                **({"compile": "max"} if compiled else {}),
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

    def _model(self, folder: str) -> HFModel:
        if folder not in self.models:
            self.models[folder] = load_model(folder, dtype="float32", device="cpu")
        return self.models[folder]


if __name__ == "__main__":
    serve(Outrider())
