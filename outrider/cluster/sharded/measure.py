"""Measures what the rounds of a sharded target cost, beside a model of them.

    exchange of n bytes     α + n / b                    seconds, all ranks taking part
    forward pass            local work + Σ over its all-reduces of (α + n / b)
    round                   γ draft steps + forward pass over γ + 1 tokens + one message + host work
    draft model on rank 0   … + γ (α' + n' / b'), the logits of a draft step being n' bytes

α and b are fitted to all-reduces of several sizes, α' and b' to broadcasts. The local work is a
forward pass in which the all-reduces are left out, so it includes what a plan exchanges by other
means, such as the logits. The host work is what rounds take besides forward passes. The model is
the usual one of latency and bandwidth (Hockney, "The communication challenge for MPP", Parallel
Computing 20(3), 1994).

Legend: B rows, N query tokens, V vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from outrider.cluster.sharded.engine import ShardedEngine
from outrider.cluster.sharded.loading import Placement
from outrider.cluster.sharded.lockstep import Follower, leading
from outrider.cluster.sharded.ranks import Ranks
from outrider.cluster.sharded.remote_draft import RankZeroModel
from outrider.core.errors import IncompatibleError
from outrider.engine.prompts import Prompt
from outrider.runtime import HFModel
from outrider.runtime.forward_batch import ForwardBatch
from outrider.sampling import Sampling

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 21)
"""Bytes of the exchanges that are measured."""

_WIDTH = 256  # of the matrices that are multiplied before an exchange
_EXCHANGES = 10  # of each size for each repeat


@dataclass(frozen=True)
class Link:
    """A fit of α + n / b.

    Attributes:
        latency: α, in seconds.
        bandwidth: b, in bytes per second.
    """

    latency: float
    bandwidth: float

    def seconds(self, num_bytes: float) -> float:
        """The time of an exchange."""
        return self.latency + num_bytes / self.bandwidth

    @staticmethod
    def fit(seconds: Mapping[int, float]) -> "Link":
        """The line through times by number of bytes, by least squares of relative errors; neither
        of its terms is negative.

        Args:
            seconds: of at least two sizes.
        """
        weights = {n: 1 / t**2 for n, t in seconds.items()}
        total = sum(weights.values())
        mean_n = sum(w * n for n, w in weights.items()) / total
        mean_t = sum(w * seconds[n] for n, w in weights.items()) / total
        spread = sum(w * (n - mean_n) ** 2 for n, w in weights.items())
        slope = sum(w * (n - mean_n) * (seconds[n] - mean_t) for n, w in weights.items()) / spread
        slope = max(slope, 1e-15)
        return Link(max(mean_t - slope * mean_n, 0.0), 1 / slope)


@dataclass(frozen=True)
class PassTime:
    """A forward pass of the target.

    Attributes:
        local: seconds without the all-reduces.
        measured: seconds with them.
        exchanged: bytes of each all-reduce.
    """

    local: float
    measured: float
    exchanged: tuple[int, ...]

    def predicted(self, link: Link) -> float:
        """Seconds by the model."""
        return self.local + sum(map(link.seconds, self.exchanged))


@dataclass(frozen=True)
class RoundTime:
    """A round, by placement of the draft model.

    Attributes:
        measured: seconds.
        predicted: seconds by the model.
    """

    measured: float
    predicted: float


@dataclass(frozen=True)
class Measurement:
    """What was measured on rank 0.

    Attributes:
        size: processes.
        num_speculative_tokens: γ.
        all_reduce, broadcast: fits of the exchanges.
        message: seconds that a message to the followers takes rank 0.
        draft_step: seconds of a forward pass of the draft model over one token.
        target: the target's forward pass over γ + 1 tokens.
        rounds: by placement.
    """

    size: int
    num_speculative_tokens: int
    all_reduce: Link
    broadcast: Link
    message: float
    draft_step: float
    target: PassTime
    rounds: Mapping[Placement, RoundTime]

    def document(self) -> dict[str, Any]:
        """As JSON, with the predicted forward pass."""
        document = asdict(self)
        document["target"]["predicted"] = self.target.predicted(self.all_reduce)
        document["target"]["exchanged"] = sum(self.target.exchanged)
        document["target"]["num_exchanges"] = len(self.target.exchanged)
        return document


def measure(
    ranks: Ranks, engine: ShardedEngine, prompt: Prompt, sampling: Sampling, repeats: int
) -> Measurement | None:
    """All ranks call this.

    Args:
        ranks: the processes.
        engine: with a draft model on every rank.
        prompt: what the measured rounds continue.
        sampling: how.
        repeats: how often each exchange and forward pass runs; medians count.

    Returns:
        The measurement on rank 0; None elsewhere.

    Raises:
        IncompatibleError: an engine without a draft model.
    """
    if engine.draft is None:
        raise IncompatibleError(
            f"method {engine.method.name!r} has no draft model whose placement could be measured: "
            f"take method='speculative' and a draft"
        )
    γ = engine.num_speculative_tokens
    device = engine.target.device
    all_reduce = Link.fit(_seconds_by_size(dist.all_reduce, device, repeats))
    broadcast = Link.fit(_seconds_by_size(lambda x: dist.broadcast(x, 0), device, repeats))
    message = _median(lambda: ranks.agree(None), repeats, device)
    draft_step = _median(_forward_pass(engine.draft, 1), repeats, device)
    target = _pass_time(engine.target, γ + 1, repeats)
    logits = engine.draft.num_tokens * torch.finfo(engine.draft.dtype).bits // 8
    alone = γ * draft_step + target.predicted(all_reduce) + message
    models: dict[Placement, tuple[HFModel, float]] = {
        "replicated": (engine.draft, alone),
        "rank0": (
            RankZeroModel(ranks, engine.draft.module, engine.draft.tokenizer, engine.draft.name),
            alone + γ * broadcast.seconds(logits),
        ),
    }
    rounds = {}
    for placement, (draft, model_seconds) in models.items():
        again = ShardedEngine(
            ranks, engine.target, draft, engine.method, num_speculative_tokens=γ, max_batch_size=1
        )
        found = _round(ranks, again, prompt, sampling)
        if found is not None:
            seconds, host = found
            rounds[placement] = RoundTime(seconds, model_seconds + host)
    if not ranks.leads:
        return None
    return Measurement(ranks.size, γ, all_reduce, broadcast, message, draft_step, target, rounds)


def _round(
    ranks: Ranks, engine: ShardedEngine, prompt: Prompt, sampling: Sampling
) -> tuple[float, float] | None:
    """Seconds of a round, and of these its host work, on rank 0."""
    if not ranks.leads:
        Follower(ranks, engine.new_scheduler()).follow()
        return None
    with leading(ranks):
        engine.generate([prompt], sampling)  # the first run may allocate memory
        stats = engine.generate([prompt], sampling).stats
    passes = stats.draft_seconds + stats.target_seconds
    return (passes + stats.other_seconds) / stats.rounds, stats.other_seconds / stats.rounds


def _seconds_by_size(
    exchange: Callable[[Tensor], object], device: torch.device, repeats: int
) -> dict[int, float]:
    """Mean seconds of an exchange by number of bytes; means, because a forward pass takes the sum
    of many. Before each exchange all ranks compute something, as in a forward pass: an exchange
    takes longer where the processes do not arrive at once."""
    weight = torch.ones(_WIDTH, _WIDTH, device=device)
    seconds = {}
    for num_bytes in SIZES:
        tensor = torch.zeros(num_bytes // 4, device=device)
        times = []
        for _ in range(_EXCHANGES * repeats):
            weight @ weight
            _wait_for(device)
            began = time.perf_counter()
            exchange(tensor)
            _wait_for(device)
            times.append(time.perf_counter() - began)
        seconds[num_bytes] = fmean(times[repeats:])  # the first ones may set up connections
    return seconds


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _pass_time(target: HFModel, num_tokens: int, repeats: int) -> PassTime:
    """The times of a forward pass over so many tokens after a short prompt."""
    run = _forward_pass(target, num_tokens)
    measured = _median(run, repeats, target.device)
    with _all_reduces_left_out() as exchanged:
        run()
        per_pass = tuple(exchanged)
        local = _median(run, repeats, target.device)
    return PassTime(local, measured, per_pass)


@contextmanager
def _all_reduces_left_out() -> Iterator[list[int]]:
    """Leaves out all-reduces; collects how many bytes each would have exchanged."""
    exchanged: list[int] = []

    def note(tensor: Tensor, *arguments: object, **settings: object) -> None:
        exchanged.append(tensor.nbytes)

    with patch.object(dist, "all_reduce", note):
        yield exchanged


def _forward_pass(model: HFModel, num_tokens: int) -> Callable[[], object]:
    """A forward pass that commits nothing, and so can be repeated."""
    cache = model.example_cache()
    tokens_BN = torch.zeros(1, num_tokens, dtype=torch.int64, device=model.device)

    @torch.inference_mode()
    def run() -> None:
        model.forward(ForwardBatch(cache, tokens_BN))
        cache.health.drain()

    return run


def _median(run: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Median seconds, after one run that does not count."""
    run()
    seconds: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        _wait_for(device)
        seconds.append(time.perf_counter() - began)
    return median(seconds)


def lines(found: Measurement) -> Sequence[str]:
    """The measurement as text."""
    target = found.target
    predicted = target.predicted(found.all_reduce)
    rows = [
        f"{found.size} processes, γ = {found.num_speculative_tokens}; medians on rank 0",
        f"all-reduce       {_link(found.all_reduce)}",
        f"broadcast        {_link(found.broadcast)}",
        f"message          {1e6 * found.message:.0f} µs",
        f"draft step       {1e3 * found.draft_step:.2f} ms",
        f"target pass      {1e3 * target.measured:.2f} ms; model {1e3 * predicted:.2f} ms "
        f"({1e3 * target.local:.2f} ms + {len(target.exchanged)} all-reduces of "
        f"{sum(target.exchanged) / max(1, len(target.exchanged)) / 1024:.1f} KiB)",
    ]
    for placement, each in found.rounds.items():
        measured, predicted = 1e3 * each.measured, 1e3 * each.predicted
        rows.append(f"{placement:<11}round {measured:.2f} ms; model {predicted:.2f} ms")
    return rows


def _link(link: Link) -> str:
    return f"{1e6 * link.latency:.0f} µs + n / {link.bandwidth / 1e9:.2f} GB/s"
