"""The likelihood of texts under OpenVINO, with the weights and properties of ``openvino_worker``.

Each text is one forward pass of the exported model, since the pipeline returns no logits of a
prompt. A row is ``plain`` or ``plain int8``.
"""

from typing import Any

import numpy as np
import openvino
from numpy.typing import NDArray

from benchmarks.peer_workers.openvino_worker import source_of
from benchmarks.peer_workers.protocol import Job, Likelihood, Ready, serve, watch


class OpenVINOScoring:
    """A worker with one model."""

    def __init__(self) -> None:
        self.model: Any = None

    def prepare(self, row: str, job: Job) -> Ready:
        source = source_of(row, job)
        with watch() as spent:
            self.model = openvino.Core().compile_model(
                source.target / "openvino_model.xml", "CPU", source.properties
            )
        return Ready(source.precision, job.threads, openvino.__version__, spent.seconds)

    def likelihood(self, texts: list[list[int]]) -> Likelihood:
        return Likelihood(sum(map(self._nats, texts)), sum(len(text) - 1 for text in texts))

    def close(self) -> None:
        self.model = None

    def _nats(self, text: list[int]) -> float:
        ids = np.array([text], dtype=np.int64)
        request = self.model.create_infer_request()
        inputs = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(len(text))[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        logits_NV: NDArray[np.float64] = request.infer(inputs)["logits"][0].astype(np.float64)
        return cross_entropy(logits_NV[:-1], ids[0, 1:])


def cross_entropy(logits_NV: NDArray[np.float64], following_N: NDArray[np.int64]) -> float:
    """The sum of the negative log-probabilities of the following tokens."""
    best_N = logits_NV.max(-1)
    total_N = np.log(np.exp(logits_NV - best_N[:, None]).sum(-1)) + best_N
    return float((total_N - logits_NV[np.arange(len(following_N)), following_N]).sum())


if __name__ == "__main__":
    serve(OpenVINOScoring())
