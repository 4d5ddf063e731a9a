"""String-level rejection sampling: the distribution of the target's first token in text that a
draft writes.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies", ICML 2025, Algorithm 3 (there q is the target, p the draft).

    x_1, x_2, … ~ q   until the first token t of the target in the text D(x_1 … x_i) is settled
    ψ(t) = Σ q(x_1) q(x_2 | x_1) … q(x_i | x_1 … x_{i-1})   over all x_1 … x_i that lead to t

and t ~ ψ is verified against p as a draft from ψ. It can draft tokens that the draft model lacks,
which token-level intersection cannot. For a chain the step is repeated behind t.

A laboratory method. The strings to sum over grow exponentially with the target's longest token:
(the draft's vocabulary) ^ (its length). They are listed at construction, and rejected beyond
``max_strings``, which any vocabulary in use exceeds; no method's name leads here.

The target reads by longest match, so that a bounded text settles a token. (A tokenizer with merges
settles nothing: more text may always change the first token.) Text that begins with no token of the
target has no mass in ψ. ψ is warped like a distribution of the target's own, as the intersection
is.

Proposes: i.i.d. chains.

Legend: B rows, D drafted tokens, N nodes, V the target's vocabulary, U the draft's, S unsettled
strings (the empty one first, every other behind the one it continues).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core import Budget, Context, Draft, Drawn, Prefix, Role, Scores, Stream, Verdict, draw
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.none import NoState
from outrider.runtime import HFModel
from outrider.runtime.hf.vocabulary_bridge import Bridge
from outrider.sampling import Sampling, Warp


class SlrsDrafter:
    """Draws chains from ψ, worked out in full at every place.

    Args:
        target: the model that verifies.
        model: the draft model, with a tokenizer of its own.
        max_strings: most strings of the draft's tokens to sum over at a place.

    Raises:
        VocabularyMismatchError: a model without a tokenizer.
        IncompatibleError: more strings than that, or none that begins with a token of the target.
    """

    drawn: Drawn = "iid"

    def __init__(self, target: HFModel, model: HFModel, max_strings: int = 4096) -> None:
        self.model = model
        self.bridge = Bridge(target, model)
        self._own_distribution = Warp([Sampling()], model.num_tokens, model.device)
        self._strings: list[tuple[int, ...]] = [()]
        self._parents: list[int] = [0]
        self._first_SU = self._settle(max_strings).to(model.device)
        self._reached_V = torch.zeros(target.num_tokens, dtype=torch.bool, device=model.device)
        self._reached_V[self._first_SU[self._first_SU >= 0]] = True
        if not bool(self._reached_V.any()):
            raise IncompatibleError("no text of the draft begins with a token of the target")

    @property
    def models(self) -> tuple[HFModel, ...]:
        return (self.model,)

    def start(self, context: Context) -> NoState:
        return NoState()

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        γ, B = budget.max_tokens, context.num_rows
        if not γ:
            return Draft.root_only(context.root_B)
        rows = zip(context.tokens_BT.tolist(), context.lengths, strict=True)
        texts = [tuple(tokens[:length]) for tokens, length in rows]
        tokens, distributions = [context.root_B], []
        u_BD = rng.uniform(Role.DRAFT, γ)
        for i in range(γ):
            psi_BV = self._psi_of(texts)
            q_BV = context.distribution(
                psi_BV.log()[:, None], Prefix.of_chain(context, tokens[1:])
            )[:, 0]
            uniform_V = self._reached_V.to(q_BV.dtype) / self._reached_V.sum()
            q_BV = torch.where(q_BV.sum(-1, keepdim=True) > 0, q_BV, uniform_V)
            tokens.append(draw(q_BV, u_BD[:, i]))
            distributions.append(q_BV)
            texts = [(*text, x) for text, x in zip(texts, tokens[-1].tolist(), strict=True)]
        distributions.append(torch.zeros_like(distributions[-1]))
        mask_BN = torch.ones(B, γ + 1, dtype=torch.bool, device=context.device)
        if budget.tokens_B is not None:
            node_N = torch.arange(γ + 1, device=context.device)
            mask_BN = node_N <= budget.tokens_B[:, None]
        return Draft.chain(torch.stack(tokens, 1), mask_BN, torch.stack(distributions, 1), "iid")

    def commit(self, state: NoState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing to learn."""

    def join(self, state: NoState, other: NoState) -> None:
        """Nothing to join."""

    def psi(self, text: Sequence[int]) -> Tensor:
        """ψ behind a text in the target's tokens, (V,), summing to the mass of strings that begin
        with a token of the target."""
        told = self.bridge.translate(text)
        prompts = [[*told, *string] for string in self._strings]
        nothing = [0] * len(prompts)
        context = Context.start(
            prompts, self._own_distribution, nothing, nothing, self.model.device
        )
        cache = self.model.start(context)
        q_SU = self.model.extend(cache, context.root_B[:, None])[:, 0].double().softmax(-1)
        context.health.check(len(text) - 1)
        mass = [torch.ones((), dtype=q_SU.dtype, device=q_SU.device)]
        for s in range(1, len(prompts)):
            mass.append(mass[self._parents[s]] * q_SU[self._parents[s], self._strings[s][-1]])
        weight_SU = torch.stack(mass)[:, None] * q_SU
        settled_SU = self._first_SU >= 0
        psi_V = torch.zeros(len(self._reached_V), dtype=q_SU.dtype, device=q_SU.device)
        return psi_V.index_add(0, self._first_SU[settled_SU], weight_SU[settled_SU])

    def _psi_of(self, texts: Sequence[tuple[int, ...]]) -> Tensor:
        """Once for each text that occurs, (B, V)."""
        known = {text: self.psi(text) for text in dict.fromkeys(texts)}
        return torch.stack([known[text] for text in texts])

    def _settle(self, max_strings: int) -> Tensor:
        """Lists the unsettled strings; which token of the target each further token of the draft
        settles, (S, U): -1 where the string stays unsettled or begins with none."""
        target, draft = self.bridge.target, self.bridge.draft
        pieces = sorted({p for p in target.pieces if p}, key=len, reverse=True)
        first: list[list[int]] = []
        for s, string in enumerate(self._strings):  # grows as it is read
            settled = [-1] * draft.num_tokens
            for x, piece in enumerate(draft.pieces):
                text = draft.bytes_of(string) + piece
                if not piece:
                    continue
                if any(p.startswith(text) and len(p) > len(text) for p in pieces):
                    self._strings.append((*string, x))
                    self._parents.append(s)
                    continue
                found = next((p for p in pieces if text.startswith(p)), None)
                settled[x] = -1 if found is None else target.ids[found]
            first.append(settled)
            if len(self._strings) * draft.num_tokens > max_strings:
                raise IncompatibleError(
                    f"more than {max_strings} strings of the draft's tokens lead to the target's, "
                    f"whose longest has {len(pieces[0])} bytes: take method='tli' or 'slem'"
                )
        return torch.tensor(first)
