"""Log-probabilities of given continuations under a model, by forward passes over many tokens.

They are the log softmax of the model's own logits: temperature 1, no truncation, no penalties,
whatever the continuation was sampled with. The softmax is computed in float32, or in float64 for a
model of that precision.

Rows of a batch have prompts and continuations of any length: the KV cache writes each row at its
own slots, and a row leaves the batch once its continuation has been read, so padding enters no
result. A pass reads so many tokens that its logits fit into a fixed amount of memory.

Legend: B rows, N query tokens of a pass, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.clock import Stopwatch
from outrider.core.context import Context
from outrider.core.errors import PromptError
from outrider.core.lengths import Lengths
from outrider.runtime import HFModel
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.kv_cache.storage import KVCachePlan

BATCH = 16
_MOST_LOGITS = 2**25
"""Logits that one forward pass may return: 128 MiB in float32."""


@dataclass(frozen=True)
class ContinuationLogprobs:
    """A continuation under a model.

    Attributes:
        logprobs: of each token given all before it, in nats.
        greedy: whether every token is the most probable one at its position.
    """

    logprobs: tuple[float, ...]
    greedy: bool

    @property
    def total(self) -> float:
        """The log-probability of the whole continuation; 0 for an empty one."""
        return math.fsum(self.logprobs)


@torch.inference_mode()
def continuation_logprobs(
    model: HFModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch_size: int = BATCH,
    progress: Callable[[int], None] = lambda done: None,
) -> list[ContinuationLogprobs]:
    """Scores continuations, each after a prompt of its own.

    Continuations of similar lengths share a batch. The passes run eagerly, on a KV cache in the
    model's own precision.

    Args:
        model: the model.
        pairs: token ids of a prompt, at least one, and of its continuation. The prompt of an
            encoder-decoder is what the encoder reads.
        batch_size: most rows of a forward pass.
        progress: called after each batch with the number of continuations that are done.

    Returns:
        One per pair, in their order.

    Raises:
        PromptError: an empty prompt, a token id out of range, or more tokens than the context has.
        NonFiniteLogitsError: the model produced NaN or infinite logits.
    """
    for index, (prompt, continuation) in enumerate(pairs):
        _check(model, index, prompt, continuation)
    reader = _reader(model)
    by_length = sorted(range(len(pairs)), key=lambda i: len(pairs[i][1]), reverse=True)
    found: dict[int, ContinuationLogprobs] = {}
    for first in range(0, len(pairs), batch_size):
        chosen = by_length[first : first + batch_size]
        for index, scored in zip(chosen, _batch(reader, [pairs[i] for i in chosen]), strict=True):
            found[index] = scored
        progress(len(found))
    return [found[index] for index in range(len(pairs))]


def _batch(
    model: HFModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[ContinuationLogprobs]:
    """Scores the pairs of one batch."""
    logprobs: list[list[float]] = [[] for _ in pairs]
    greedy = [True] * len(pairs)
    for rows, chosen_BN, best_BN in _passes(model, pairs):
        lines = zip(rows, chosen_BN.tolist(), best_BN.tolist(), strict=True)
        for row, chosen, best in lines:
            left = len(pairs[row][1]) - len(logprobs[row])
            logprobs[row] += chosen[:left]
            greedy[row] &= all(best[:left])
    return [
        ContinuationLogprobs(tuple(each), best) for each, best in zip(logprobs, greedy, strict=True)
    ]


def _passes(
    model: HFModel, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Reads the continuations of a batch pass by pass.

    Yields:
        The rows that a pass read, by index; the log-probabilities of their next tokens, (B, N); and
        whether these are the most probable ones, (B, N). What lies past the end of a row's
        continuation is arbitrary.
    """
    rows = [row for row, (_, continuation) in enumerate(pairs) if continuation]
    if not rows:
        return
    context = _context(model, [pairs[row][0] for row in rows])
    cache = model.start(context)
    done = 0
    while rows:
        left = [len(pairs[row][1]) - done for row in rows]
        room = min(model.draft_room(length) for length in context.lengths)
        width = min(max(left), _most_tokens(model, len(rows)), room + 1)
        tokens_BN = torch.zeros(len(rows), width, dtype=torch.int64)
        for b, row in enumerate(rows):
            upcoming = torch.tensor(pairs[row][1][done : done + width], dtype=torch.int64)
            tokens_BN[b, : len(upcoming)] = upcoming
        tokens_BN = tokens_BN.to(model.device)
        queries_BN = torch.cat([context.root_B[:, None], tokens_BN[:, :-1]], 1)
        logits_BNV = model.forward(ForwardBatch(cache, queries_BN)).logits_BNV
        context.health.check(max(context.lengths))
        wide = torch.promote_types(logits_BNV.dtype, torch.float32)
        logprobs_BNV = logits_BNV.to(wide).log_softmax(-1)
        chosen_BN = logprobs_BNV.gather(2, tokens_BN[..., None])[..., 0]
        yield rows, chosen_BN, logprobs_BNV.argmax(-1) == tokens_BN
        done += width
        staying = [b for b, each in enumerate(left) if each > width]
        if len(staying) < len(rows):
            rows = [rows[b] for b in staying]
            if not rows:
                return
            cache.keep(staying)
            context.keep(staying)
        cache.append(width)
        context.append(tokens_BN[staying], Lengths.of([width] * len(rows), model.device))


def _reader(model: HFModel) -> HFModel:
    """The model with caches of its own precision, outside every memory limit and prefix cache, and
    with a clock of its own."""
    reader = model.without_compiled()
    reader.plan, reader.prefixes, reader.watch = KVCachePlan(), None, Stopwatch(model.device)
    return reader


def _context(model: HFModel, prompts: Sequence[Sequence[int]]) -> Context:
    """A batch from which nothing is sampled."""
    distribution: Any = None
    none = [0] * len(prompts)
    if model.decoder_prompt is None:
        return Context.start(prompts, distribution, none, none, model.device)
    first = [model.decoder_prompt] * len(prompts)
    return Context.start(first, distribution, none, none, model.device, prompts)


def _most_tokens(model: HFModel, num_rows: int) -> int:
    return max(1, _MOST_LOGITS // (model.num_tokens * num_rows))


def _check(model: HFModel, index: int, prompt: Sequence[int], continuation: Sequence[int]) -> None:
    if not prompt:
        raise PromptError(
            f"prompt {index} is empty: give at least one token, such as the BOS token"
        )
    for token in (*prompt, *continuation):
        if not 0 <= token < model.num_tokens:
            raise PromptError(
                f"token id {token} of pair {index}: {model.name} has the ids 0 to "
                f"{model.num_tokens - 1}; another tokenizer wrote it"
            )
    is_decoder = model.decoder_prompt is None
    first = len(prompt) if is_decoder else len(model.decoder_prompt or ())
    if first + max(len(continuation) - 1, 0) > model.limit:
        raise PromptError(
            f"pair {index} has {first} and {len(continuation)} tokens, the context of {model.name} "
            f"{model.limit}: shorten the prompt or the continuation"
        )
    if not is_decoder and len(prompt) > model.prompt_limit:
        raise PromptError(
            f"prompt {index} has {len(prompt)} tokens, the encoder of {model.name} reads "
            f"{model.prompt_limit}: shorten it"
        )
