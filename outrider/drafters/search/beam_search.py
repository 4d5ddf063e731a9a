"""Beam search with the conventions of ``transformers``, the beams sharing the prefix cache.

The result is that of its ``generate(num_beams=…, do_sample=False)``, hypothesis for hypothesis. A
hypothesis of t new tokens, its end-of-sequence token included, has the score

    s = Σ log p(x_i | prompt, x_1 … x_{i-1}) / t^length_penalty,     log p in float32

Each step takes the (1 + number of end-of-sequence ids)·B best continuations, at least 2·B. Of the
first B, those that end with an end-of-sequence token are finished, and the best B finished
hypotheses are kept. The best B continuations that do not end live on. The search stops

    early_stopping=True      as soon as B are finished
    False                    as soon as B are finished and the worst of them scores at least as
                             much as the best living beam would if it ended at its present length
    "never"                  the same, with max_new_tokens for that length if length_penalty > 0

The last two are heuristics, for either sign of the penalty: see ``_check_early_stop_heuristic`` in
``transformers``. At max_new_tokens all beams finish.

``transformers`` gives every beam a cache of its own, a copy of the prompt's included, and re-orders
all of it at every step. Here the beams are the nodes of one tree after the prompt (``BeamTree``),
and nothing moves when they branch. The slots of dead beams stay allocated and are masked. Whenever
the tree has doubled, the slots of living beams are packed together, so on average a slot is moved
once in as many tokens as the tree has.

Logit bias, penalties and processors apply to the *log-probabilities*, and scores are sums of the
results, as in ``transformers``.

One prompt at a time: prompts could share forward passes, as rows do elsewhere, but do not yet.

Legend: B rows (one), n beams, k continuations, M nodes of the tree, V vocabulary.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from outrider.core import Context
from outrider.core.errors import InvalidParameterError, PromptError
from outrider.drafters.search.beam_tree import BeamTree, best
from outrider.runtime import HFModel, KVCache
from outrider.sampling import Sampling, Warp

EarlyStopping = bool | Literal["never"]
_PACK_FROM = 64


@dataclass(frozen=True)
class Hypothesis:
    """A finished continuation of a prompt.

    Attributes:
        score: log-likelihood divided by length**length_penalty.
        token_ids: its new tokens, the end-of-sequence token included if it has one.
    """

    score: float
    token_ids: tuple[int, ...]


@torch.inference_mode()
def beam_search(
    model: HFModel,
    prompt_ids: Sequence[int],
    num_beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    eos_ids: Collection[int] = (),
    num_return_sequences: int = 1,
    sampling: Sampling | None = None,
    prompt_length: int | None = None,
    source_ids: Sequence[int] | None = None,
) -> list[Hypothesis]:
    """The best continuations of a prompt that beam search finds, best first.

    Args:
        model: the model.
        prompt_ids: token ids, one or more.
        num_beams: B. With 1 beam the result differs from that of ``transformers``, which then
            decodes greedily.
        max_new_tokens: most tokens of a hypothesis.
        length_penalty: exponent of the length; larger values favour longer hypotheses.
        early_stopping: when the search stops; see above.
        eos_ids: tokens that end a hypothesis (``Engine.eos_ids`` has the model's).
        num_return_sequences: how many of the B hypotheses to return.
        sampling: its logit bias, penalties and processors apply; the rest of it does not.
        prompt_length: how many of ``prompt_ids`` presence and frequency penalties leave out; None
            for all of them.
        source_ids: the source text of an encoder-decoder; ``prompt_ids`` are then the decoder's,
            and begin with the model's ``decoder_prompt``.

    Raises:
        InvalidParameterError: a number out of range, or more tokens than the context has room for.
        PromptError: an empty prompt, token ids out of range; a source that is missing, too long,
            or given to a model without an encoder.
        NonFiniteLogitsError: the model produced NaN or infinite logits.
    """
    _check_tokens("the prompt", prompt_ids, model)
    _check_source(source_ids, model)
    check_search(num_beams, length_penalty, early_stopping)
    _require_whole("num_return_sequences", num_return_sequences, num_beams)
    _require_whole("max_new_tokens", max_new_tokens, model.limit - len(prompt_ids))
    _check_factors(len(prompt_ids), max_new_tokens, model)
    search = _Search(num_beams, max_new_tokens, length_penalty, early_stopping)
    distribution = Warp([sampling or Sampling()], model.num_tokens, model.device)
    sources = None if source_ids is None else [source_ids]
    context = Context.start([prompt_ids], distribution, [0], [0], model.device, sources)
    if prompt_length is not None:
        context.prompt_length_B = torch.full_like(context.length_B, prompt_length)
    beams = _Beams(model, context)
    num_candidates = max(2, 1 + len(set(eos_ids))) * num_beams
    while True:
        scores, parents, tokens = beams.continuations(num_candidates)
        search.num_tokens += 1
        at_end = search.num_tokens == max_new_tokens
        ends = [at_end or token in eos_ids for token in tokens]
        for i, ended in enumerate(ends[:num_beams]):
            if ended:
                search.finish(scores[i], (*beams.outputs[parents[i]], tokens[i]))
        live = [i for i, ended in enumerate(ends) if not ended][:num_beams]
        if not live or search.is_over(scores[live[0]]):
            return search.finished[:num_return_sequences]
        beams.grow([scores[i] for i in live], [parents[i] for i in live], [tokens[i] for i in live])


def check_search(num_beams: int, length_penalty: float, early_stopping: EarlyStopping) -> None:
    """Raises InvalidParameterError for arguments that no search can have."""
    _require_whole("num_beams", num_beams, 65536)
    if not math.isfinite(length_penalty):
        raise InvalidParameterError(f"length_penalty={length_penalty!r}: must be finite")
    if early_stopping not in (True, False, "never"):
        raise InvalidParameterError(
            f"early_stopping={early_stopping!r}: must be True, False or 'never'"
        )


@dataclass
class _Search:
    """The finished hypotheses of a search, and whether it goes on.

    Attributes:
        num_tokens: new tokens of the living beams.
        finished: the best finished hypotheses so far, best first.
    """

    num_beams: int
    max_new_tokens: int
    length_penalty: float
    early_stopping: EarlyStopping
    num_tokens: int = 0
    finished: list[Hypothesis] = field(default_factory=list)

    def finish(self, log_likelihood: float, token_ids: tuple[int, ...]) -> None:
        score = log_likelihood / self.num_tokens**self.length_penalty
        every = [*self.finished, Hypothesis(score, token_ids)]
        ranked = sorted(every, key=lambda hypothesis: -hypothesis.score)
        self.finished = ranked[: self.num_beams]

    def is_over(self, best_living: float) -> bool:
        if len(self.finished) < self.num_beams:
            return False
        if self.early_stopping is True:
            return True
        longest = self.early_stopping == "never" and self.length_penalty > 0
        length = self.max_new_tokens if longest else self.num_tokens
        return best_living / length**self.length_penalty <= self.finished[-1].score


class _Beams:
    """The living beams of one prompt.

    Attributes:
        outputs: their new tokens.
    """

    def __init__(self, model: HFModel, context: Context) -> None:
        self.outputs: list[tuple[int, ...]] = [()]
        self._context = context
        self._model = model
        self._first_token_B1 = context.root_B[:, None]
        self._cache: KVCache = model.start(context)
        self._cache.limit = 2**62  # the tree has more slots than positions; only these are bounded
        self._tree = BeamTree.root(context.tokens_BT)
        self._score_Bn = torch.zeros(1, 1, device=model.device)
        self._pack_at = _PACK_FROM

    def continuations(self, k: int) -> tuple[list[float], list[int], list[int]]:
        """Scores, parents and tokens of the k best continuations, best first. Runs the model."""
        log_p_BnV = self._logits().float().log_softmax(-1)
        prefix = self._tree.prefix(self._context, self._score_Bn)
        log_p_BnV = self._context.distribution.logits(log_p_BnV, prefix)
        score_Bk, index_Bk = best(self._score_Bn, log_p_BnV, k)
        V = log_p_BnV.shape[2]
        return score_Bk[0].tolist(), (index_Bk[0] // V).tolist(), (index_Bk[0] % V).tolist()

    def grow(self, scores: list[float], parents: list[int], tokens: list[int]) -> None:
        """Makes these continuations the living beams."""
        device = self._model.device
        self.outputs = [(*self.outputs[p], token) for p, token in zip(parents, tokens, strict=True)]
        self._score_Bn = torch.tensor([scores], device=device)
        self._tree = self._tree.grown(
            torch.tensor([parents], device=device), torch.tensor([tokens], device=device)
        )
        if self._tree.tokens_BM.shape[1] > self._pack_at:
            self._tree, old_M = self._tree.packed()
            self._cache.pack(old_M[None, : -len(tokens)])  # the new nodes have no slots yet
            self._pack_at = max(_PACK_FROM, 2 * len(old_M))

    def _logits(self) -> Tensor:
        """Logits after the living beams, (B, n, V)."""
        if not self._tree.tokens_BM.shape[1]:
            logits_BnV = self._model.extend(self._cache, self._first_token_B1)
            self._cache.append(1)
        else:
            logits_BnV = self._model.extend(self._cache, self._tree.last_Bn, self._tree.nodes)
        self._cache.health.check(max(self._cache.lengths))
        return logits_BnV


def _check_factors(length: int, max_new_tokens: int, model: HFModel) -> None:
    most = model.draft_room(length) + 1
    if max_new_tokens > most:
        raise InvalidParameterError(
            f"max_new_tokens={max_new_tokens}: beam search after {length} tokens may emit {most} "
            f"here, for {model.name} has LongRoPE, whose factors change beyond {model.original} "
            f"tokens; lower it, or give a prompt longer than that"
        )


def _check_tokens(what: str, ids: Sequence[int], model: HFModel) -> None:
    if not ids or not all(0 <= token < model.num_tokens for token in ids):
        raise PromptError(
            f"{what} needs one token id or more, each from 0 to {model.num_tokens - 1}"
        )


def _check_source(source_ids: Sequence[int] | None, model: HFModel) -> None:
    if model.decoder_prompt is None:
        if source_ids is not None:
            raise PromptError(f"{model.name} has no encoder: leave out source_ids")
        return
    if source_ids is None:
        raise PromptError(
            f"{model.name} is an encoder-decoder: give what its encoder reads as source_ids, and "
            f"as the prompt {list(model.decoder_prompt)}, which begins its outputs"
        )
    _check_tokens("source_ids", source_ids, model)
    if len(source_ids) > model.prompt_limit:
        raise PromptError(
            f"source_ids has {len(source_ids)} tokens, the encoder reads {model.prompt_limit}: "
            f"shorten it by {len(source_ids) - model.prompt_limit}"
        )


def _require_whole(name: str, value: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise InvalidParameterError(f"{name}={value!r}: must be a whole number from 1 to {most}")
