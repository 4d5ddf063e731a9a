"""ENUM: the exact output distribution of a round, computed with the real code, and its distance
from the target distribution.

The round is run with scripted random numbers, and the unit cube of all its random numbers is cut
into cells in which its decisions are constant (:mod:`outrider.testing.partition`, which states the
assumptions). The volume of a cell is the probability of its outcome. The emitted tokens are
completed to a fixed length by plain sampling from the target, and the resulting distribution is
compared with that of plain sampling from the start.

If one round emits, from every context, the beginning of a fair sample, then so does any number of
rounds; therefore one round is enough. That the next round finds the right state is checked by
``check_model`` and ``check_drafter``, and by CHI2, which runs many rounds.

Legend: B rows, T context length, N nodes, D drafted tokens (N-1), K emitted tokens, V vocabulary, C
cells, J random numbers, S sequences (V^length, the first token is the most significant digit).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Budget,
    Context,
    Distribution,
    Draft,
    Drafter,
    Lengths,
    Model,
    Prefix,
    Round,
    Stream,
    Verifier,
    run_round,
    start_batch,
)
from outrider.testing.partition import combine, partition
from outrider.testing.script import RecordingStream
from outrider.testing.toy import SoftmaxDistribution

DistributionFactory = Callable[[int], Distribution]
"""Returns a distribution for the given number of rows."""

_CHUNK = 1 << 16
_SPARE_TOKENS = 8  # initial capacity; kept small because there may be millions of rows


def softmax_distribution(num_rows: int) -> Distribution:
    """Plain softmax, the default."""
    return SoftmaxDistribution()


def greedy_distribution(num_rows: int) -> Distribution:
    """The point mass at the argmax."""
    return SoftmaxDistribution(greedy=True)


@dataclass
class ScriptedContext(Context):
    """A context whose random numbers can be replaced by scripted ones."""

    script: Stream | None = None

    @property
    def rng(self) -> Stream:
        return super().rng if self.script is None else self.script

    @classmethod
    def repeat(
        cls,
        prompt: Sequence[int],
        num_rows: int,
        distribution: DistributionFactory,
        key_B: Tensor | None = None,
        device: torch.device | str = "cpu",
    ) -> "ScriptedContext":
        """The same prompt in every row; by default with the same keys."""
        one = Context.start([prompt], distribution(1), [0], [0], device)
        lengths = Lengths(one.lengths * num_rows, one.length_B.expand(num_rows))
        return cls(
            one.tokens_BT[:, : len(prompt) + _SPARE_TOKENS].repeat(num_rows, 1),
            lengths,
            lengths.device_B,
            one.key_B.expand(num_rows) if key_B is None else key_B,
            distribution(num_rows),
        )


@dataclass(frozen=True)
class RoundDistribution:
    """The exact output distribution of one round.

    Attributes:
        emitted: the probability of each sequence of emitted tokens.
        completed_S: the distribution of the emitted tokens, completed by the target to ``length``
            tokens.
        target_S: the distribution of ``length`` tokens sampled from the target without drafts.
        length: number of tokens in a sequence.
    """

    emitted: dict[tuple[int, ...], float]
    completed_S: Tensor
    target_S: Tensor
    length: int

    @property
    def total_variation(self) -> float:
        """Total variation between the two distributions: below 1e-12 for a lossless method."""
        return 0.5 * float((self.completed_S - self.target_S).abs().sum())

    @property
    def acceptance_length(self) -> float:
        """Expected number of emitted tokens, including the correction or bonus token."""
        return sum(len(tokens) * mass for tokens, mass in self.emitted.items())


def enumerate_round(
    target: Model[Any],
    drafter: Drafter[Any],
    verifier: Verifier,
    num_tokens: int = 3,
    *,
    prompt: Sequence[int] = (0, 1),
    row_tokens: int | None = None,
    distribution: DistributionFactory = softmax_distribution,
    length: int | None = None,
) -> RoundDistribution:
    """The exact distribution of one round from a prompt.

    Args:
        target: a toy model (float64, V <= 4).
        drafter: a drafter that draws tokens by inverse CDFs of its stream's numbers.
        verifier: a verifier that compares its stream's numbers with thresholds.
        num_tokens: maximum number of tokens to draft.
        prompt: the tokens before the round.
        row_tokens: the row's own budget if it is smaller than ``num_tokens`` (a ragged budget).
        distribution: warps the logits of both models.
        length: number of tokens of the compared sequences; default ``num_tokens + 1``.

    Raises:
        AssertionError: the decisions are not made by thresholds (see ``partition``).
    """

    def run(rng: Stream | None, num_rows: int) -> Round:
        context = ScriptedContext.repeat(prompt, num_rows, distribution)
        context.script = rng
        row_tokens_B = None if row_tokens is None else torch.full((num_rows,), row_tokens)
        cache, state = start_batch(context, target, drafter)
        budget = Budget(num_tokens, row_tokens_B)
        return run_round(context, target, cache, drafter, state, verifier, budget)

    recorder = RecordingStream(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    run(recorder, 64)

    def scripted(u_BJ: Tensor) -> Round:
        return run(recorder.script(u_BJ), u_BJ.shape[0])

    def decide(u_BJ: Tensor) -> Tensor:
        return torch.cat([_decision(scripted(chunk)) for chunk in u_BJ.split(_CHUNK)])

    cells = partition(decide, recorder.num_requested)
    emitted: dict[tuple[int, ...], float] = {}
    chunks = zip(cells.middle_CJ.split(_CHUNK), cells.volume_C.split(_CHUNK), strict=True)
    for u_CJ, volume_C in chunks:
        done = scripted(u_CJ)
        num_emitted_C = done.verdict.num_accepted_B + 1
        rows = zip(done.emitted_BK.tolist(), num_emitted_C.tolist(), volume_C.tolist(), strict=True)
        for tokens, num, volume in rows:
            key = tuple(tokens[:num])
            emitted[key] = emitted.get(key, 0.0) + volume
    return complete(target, emitted, prompt, length or num_tokens + 1, distribution)


def complete(
    target: Model[Any],
    emitted: dict[tuple[int, ...], float],
    prompt: Sequence[int],
    length: int,
    distribution: DistributionFactory = softmax_distribution,
) -> RoundDistribution:
    """Completes emitted sequences to ``length`` tokens by plain sampling from the target."""
    conditionals = _conditionals(target, prompt, length, distribution)
    V = conditionals[0].shape[1]
    completed_S, target_S = torch.zeros(1).double(), torch.ones(1).double()
    by_length = [torch.zeros(V**n, dtype=torch.float64) for n in range(length + 1)]
    for tokens, mass in emitted.items():
        index = 0
        for token in tokens[:length]:
            index = index * V + token
        by_length[min(len(tokens), length)][index] += mass
    for n, p_SV in enumerate(conditionals):
        completed_S = ((completed_S + by_length[n])[:, None] * p_SV).flatten()
        target_S = (target_S[:, None] * p_SV).flatten()
    return RoundDistribution(emitted, completed_S + by_length[length], target_S, length)


def target_distribution(
    target: Model[Any],
    prompt: Sequence[int],
    length: int,
    distribution: DistributionFactory = softmax_distribution,
) -> Tensor:
    """Probability of every sequence of ``length`` tokens under plain sampling, shape (S,)."""
    return complete(target, {}, prompt, length, distribution).target_S


def _conditionals(
    target: Model[Any], prompt: Sequence[int], length: int, distribution: DistributionFactory
) -> list[Tensor]:
    """The next-token distributions after all sequences of n < length tokens, each (V^n, V)."""
    conditionals: list[Tensor] = []
    tails_SK = torch.zeros(1, 0, dtype=torch.int64)
    for _ in range(length):
        S = tails_SK.shape[0]
        context = ScriptedContext.repeat(prompt, S, distribution)
        context.append(tails_SK, Lengths.of([tails_SK.shape[1]] * S))
        draft = Draft.root_only(context.root_B)
        logits_SNV = target.score(target.start(context), draft).logits_BNV
        p_SV = context.distribution(logits_SNV, Prefix.of_draft(context, draft))[:, 0]
        conditionals.append(p_SV.double())
        V = p_SV.shape[1]
        token_S1 = torch.arange(V).repeat(S)[:, None]
        tails_SK = torch.cat([tails_SK.repeat_interleave(V, 0), token_S1], 1)
    return conditionals


def _decision(done: Round) -> Tensor:
    """One number per row that identifies all visible decisions of the round."""
    draft, verdict = done.draft, done.verdict
    index_K = torch.arange(done.emitted_BK.shape[1])
    is_emitted_BK = index_K <= verdict.num_accepted_B[:, None]
    is_path_BD = index_K[:-1] < verdict.num_accepted_B[:, None]
    parts = [
        torch.where(draft.mask_BN, draft.tokens_BN, -1),
        torch.where(draft.mask_BN, draft.parents_BN, -1),
        torch.where(is_emitted_BK, done.emitted_BK, -1),
        torch.where(is_path_BD, verdict.path_BD, -1),
    ]
    return combine(torch.cat(parts, 1))
