"""Beam search with the conventions of ``transformers``, the beams sharing the prefix cache.

Its ``generate(num_beams=…, do_sample=False)``, hypothesis for hypothesis. A hypothesis of t new
tokens, its end-of-sequence token included, has the score

    s = Σ log p(x_i | prompt, x_1 … x_{i-1}) / t^length_penalty,     log p in float32

Each step takes the (1 + number of end-of-sequence ids)·B best continuations, at least 2·B. Those
of the first B that end the text are finished, and of all finished ones the best B are kept; the
best B that do not end it live on. The search stops when nothing is left to gain, verified by the
best living beam's sum over a length:

    early_stopping=True      as soon as B are finished, or
    False                    B are finished, the worst is no worse than the best beam at its length
    "never"                  the same at max_new_tokens, if length_penalty > 0

where ``False`` and ``"never"`` differ in the length alone, and a heuristic it is for both signs of
the penalty: see ``_check_early_stop_heuristic`` there. At max_new_tokens all beams finish.

``transformers`` gives every beam a cache of its own, the prompt's copy included, and re-orders all
of it at every step. Here the beams are the nodes of one tree behind the prompt (``BeamTree``), and
nothing moves when they branch. Nodes of dead beams stay behind as slots that nobody looks at; when
the tree has doubled since the last time, the slots of the living are packed together, so a beam's
slot moves once in as many tokens as there are, on average.

Logit bias, penalties and processors apply to the *log-probabilities*, and scores are sums of what
comes out, as ``transformers`` has it.

One prompt at a time; prompts could share passes, as rows do elsewhere, but do not yet.

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
    """A finished text.

    Attributes:
        score: log-likelihood over length**length_penalty.
        token_ids: its new tokens, with the end-of-sequence token if that ended it.
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
        num_beams: B. With 1 this is not what ``transformers`` does, which then decodes greedily.
        max_new_tokens: most tokens of a hypothesis.
        length_penalty: exponent of the length; larger favours longer texts.
        early_stopping: see above.
        eos_ids: tokens that end a text (``Engine.eos_ids`` has the model's).
        num_return_sequences: how many of the B to return.
        sampling: whose logit bias, penalties and processors apply; nothing else of it does.
        prompt_length: tokens of ``prompt_ids`` that presence and frequency penalties do not count;
            None for all of them.
        source_ids: what an encoder-decoder's encoder reads; the prompt is then the decoder's, and
            begins with the model's ``decoder_prompt``.

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
                search.finish(scores[i], (*beams.texts[parents[i]], tokens[i]))
        live = [i for i, ended in enumerate(ends) if not ended][:num_beams]
        if not live or search.is_over(scores[live[0]]):
            return search.finished[:num_return_sequences]
        beams.grow([scores[i] for i in live], [parents[i] for i in live], [tokens[i] for i in live])


def check_search(num_beams: int, length_penalty: float, early_stopping: EarlyStopping) -> None:
    """Raises InvalidParameterError for what no search can be made with."""
    _require_whole("num_beams", num_beams, 65536)
    if not math.isfinite(length_penalty):
        raise InvalidParameterError(f"length_penalty={length_penalty!r}: must be finite")
    if early_stopping not in (True, False, "never"):
        raise InvalidParameterError(
            f"early_stopping={early_stopping!r}: must be True, False or 'never'"
        )


@dataclass
class _Search:
    """What is finished, and whether to go on.

    Attributes:
        num_tokens: new tokens of the living beams.
        finished: the best hypotheses so far, best first.
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
        texts: their new tokens.
    """

    def __init__(self, model: HFModel, context: Context) -> None:
        self.texts: list[tuple[int, ...]] = [()]
        self._context = context
        self._model = model
        self._first_token_B1 = context.root_B[:, None]
        self._cache: KVCache = model.start(context)
        self._cache.limit = (
            2**62
        )  # KV buffers grow by need, and it is the positions that are bounded
        self._tree = BeamTree.root(context)
        self._score_Bn = torch.zeros(1, 1, device=model.device)
        self._pack_at = _PACK_FROM

    def continuations(self, k: int) -> tuple[list[float], list[int], list[int]]:
        """Scores, parents and tokens of the k best, best first; one pass of the model."""
        log_p_BnV = self._logits().float().log_softmax(-1)
        prefix = self._tree.prefix(self._context, self._score_Bn)
        log_p_BnV = self._context.distribution.logits(log_p_BnV, prefix)
        score_Bk, index_Bk = best(self._score_Bn, log_p_BnV, k)
        V = log_p_BnV.shape[2]
        return score_Bk[0].tolist(), (index_Bk[0] // V).tolist(), (index_Bk[0] % V).tolist()

    def grow(self, scores: list[float], parents: list[int], tokens: list[int]) -> None:
        """These continuations are the living beams now."""
        device = self._model.device
        self.texts = [(*self.texts[p], token) for p, token in zip(parents, tokens, strict=True)]
        self._score_Bn = torch.tensor([scores], device=device)
        self._tree = self._tree.grown(
            torch.tensor([parents], device=device), torch.tensor([tokens], device=device)
        )
        if self._tree.tokens_BM.shape[1] > self._pack_at:
            self._tree, old_M = self._tree.packed()
            self._cache.pack(old_M[None, : -len(tokens)])  # the new ones have no slots yet
            self._pack_at = max(_PACK_FROM, 2 * len(old_M))

    def _logits(self) -> Tensor:
        """Logits behind the living beams, (B, n, V)."""
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
            f"max_new_tokens={max_new_tokens}: beam search behind {length} tokens may emit {most} "
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
            f"as the prompt {list(model.decoder_prompt)}, which begins its texts"
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
