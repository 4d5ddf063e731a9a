"""A smaller model drafts by beam search: it finds a likely path instead of drawing one.

Qin, Hu, He, Prakriya, Cong and Sun, "Multi-Token Joint Speculative Decoding for Accelerating Large
Language Model Inference", 2024 (MJSD), section 4.1; with the same beams, "Optimized Multi-Token
Joint Decoding with Auxiliary Model for LLM Inference", ICLR 2025 (MTAD).

    score(x_1 … x_i) = Σ_j log q(x_j | context, x_1 … x_{j-1})
    of the beams' B·V continuations, draw 2B without replacement ∝ exp(score); keep the best B

``search="greedy"`` keeps the best B continuations instead of drawing. ``"copies"`` samples as above
but starts from B copies of the first beam, as the authors' code does; it exists to reproduce their
numbers. The draft is the best path of length γ. It is ``searched``: its q are the draft model's
distributions along the path, but the path is not a draw from them.

The authors' code differs. It starts from B copies of one beam, takes the last step's sampling
probability for a path's likelihood, and does not re-order the distributions with the beams, so that
most of them belong to other paths. Here a search starts from one beam, scores are true joint
likelihoods, and every distribution belongs to its own path. (Their code also keeps one token under
top-p where 2B draws are needed. Here a beam that finds no token of positive probability does not
exist, so top-k or top-p can make a search narrower than B; ``narrow.py`` warns of it once.)

At temperature 0 the warped distributions are point masses, which have one path: one beam drafts the
argmax chain. (Joint greedy decoding, below, searches the softmax of the logits.)

All beams of all rows share one forward pass per step, as nodes of one tree (``beam_tree.py``).
``commit`` forgets the tree. The next round's first forward pass feeds the accepted tokens together
with the new root. Where the model is compiled, a search of γ steps is one program (``fused.py``),
unless there are processors or forced tokens.

Legend: B rows, N nodes of the draft, D drafted tokens (N-1), n beams of a step, V vocabulary,
i steps, R numbers per step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Prefix, Role, Stream
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.model import ModelBacked, ModelState, fitted
from outrider.drafters.search.beam_tree import BeamTree
from outrider.drafters.search.fused import BeamPlan, BlockPlan
from outrider.drafters.search.narrow import NarrowSearch
from outrider.drafters.search.steps import (
    Pick,
    Step,
    keep_best,
    keep_best_of_draws,
    score_dtype,
    search,
)
from outrider.runtime import HFModel
from outrider.sampling import Warp

Search = Literal["sample", "greedy", "copies"]


class BeamDrafter(ModelBacked):
    """Drafts the best path of a beam search, under the same sampling parameters as the target.

    Keeps the distributions of all beams until the search ends, γ·B·V numbers per row, since only
    the end tells which of them the best path needs. (Dropping those of dead beams would mean
    copying the others.)

    Args:
        model: the draft model; must share the target's vocabulary.
        num_tokens: width of the target's logits; the draft model's are cut or padded to it.
        beams: B, 1 or more.
        search: ``sample`` (2B draws, the best B of them), ``greedy`` (the best B), or ``copies``
            (``sample``, started with B equal beams).
        keep_logits: whether drafts carry the model's logits, for rules that verify by them. No
            compiled program makes such drafts.
        num_fused: steps of the searches that one compiled program runs: γ; 0 if none does.

    Raises:
        InvalidParameterError: fewer than 1 beam, or another kind of search.
    """

    drawn: Drawn = "searched"

    def __init__(
        self,
        model: HFModel,
        num_tokens: int,
        beams: int = 8,
        search: Search = "sample",
        *,
        keep_logits: bool = False,
        num_fused: int = 0,
    ) -> None:
        if isinstance(beams, bool) or not isinstance(beams, int) or beams < 1:
            raise InvalidParameterError(f"beams={beams!r}: must be a whole number, 1 or more")
        if search not in get_args(Search):
            raise InvalidParameterError(f"search={search!r}: must be one of {get_args(Search)}")
        super().__init__(model, num_tokens)
        self.beams = beams
        self.search = search
        self.keep_logits = keep_logits
        self._narrow = NarrowSearch(beams)
        fits = num_fused > 0 and search != "copies" and not keep_logits
        enough = model.num_tokens == num_tokens >= 2 * beams
        self._plan = self._plan_of(num_fused) if fits and enough else None

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        own = super().capabilities
        return replace(own, max_nodes=self._most_nodes, runs_trees=True, fused_tree=self._plan)

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        if budget.max_tokens < 1:
            return Draft.root_only(context.root_B)
        needed = self.model.limit + budget.max_tokens * self.beams  # dead beams keep their slots
        state.cache.limit = max(state.cache.limit, needed)
        if self._is_argmax(context):
            return self._argmax_chain(state, context, budget, rng)
        found = self._by_program(state, context, budget, rng)
        if found is None or self._plan is None:
            steps = list(self.steps(state, context, budget.max_tokens, rng))
        else:
            steps = self._plan.steps(*found)
        if not context.distribution.greedy:  # greedy searches have one beam by design
            self._narrow.watch([step.score_Bn for step in steps])
        return self._draft(steps, context, budget)

    def _plan_of(self, num_steps: int) -> BeamPlan:
        """What the compiled program of so many steps searches."""
        return BeamPlan(num_steps, self.beams, self.search == "sample")

    def _most_nodes(self, num_tokens: int) -> int:
        return (num_tokens + 1) * self.beams + 2

    def _draft(self, steps: Sequence[Step], context: Context, budget: Budget) -> Draft:
        """The best path."""
        path_BD = _best_path(steps, budget.tokens_B)
        tokens_BD = steps[-1].tree.tokens_BM.gather(1, path_BD)
        tokens_BN = torch.cat([context.root_B[:, None], tokens_BD], 1)
        mask_BN = self._within(budget, tokens_BN.shape[1], context)
        probs_BNV = _along([step.q_BnV for step in steps], path_BD)
        logits = [step.logits_BnV for step in steps if step.logits_BnV is not None]
        logits_BNV = _along(logits, path_BD) if self.keep_logits else None
        shares_BN = _shares(steps, tokens_BN, probs_BNV)
        return Draft.chain(tokens_BN, mask_BN, probs_BNV, "searched", logits_BNV, shares_BN)

    def _is_argmax(self, context: Context) -> bool:
        """Whether the search can only find the argmax chain."""
        return context.distribution.greedy and not self.keep_logits

    def _argmax_chain(
        self, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        found = self._by_program(state, context, budget, rng)
        if found is None:
            *_, last = self.steps(state, context, budget.max_tokens, rng)
            tokens_BN = torch.cat([context.root_B[:, None], last.tree.tokens_BM], 1)
        else:
            _, tokens_BN = found
        mask_BN = self._within(budget, tokens_BN.shape[1], context)
        return Draft.chain(tokens_BN, mask_BN, None, "chosen")

    def _by_program(
        self, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> tuple[Tensor, ...] | None:
        """What the program of the search returns; None if there is none."""
        plan, distribution = self._plan, context.distribution
        if plan is None or budget.max_tokens != plan.depth or not isinstance(distribution, Warp):
            return None
        argmax = self._is_argmax(context)
        fuses = distribution.keeps_logits if argmax else distribution.fuses
        if not (self._has_programs and fuses and self._can_align(state, context)):
            return None
        return self._draft_by(plan, state, context, rng, sampled=not argmax)

    def steps(
        self, state: ModelState, context: Context, num_steps: int, rng: Stream
    ) -> Iterator[Step]:
        """Runs the search, one forward pass of the model per step."""

        def distributions(tree: BeamTree, score_Bn: Tensor) -> tuple[Tensor, Tensor]:
            logits_BnV = self._logits(state, context, tree)
            return self._distributions(logits_BnV, tree.prefix(context, score_Bn)), logits_BnV

        root = BeamTree.root(context.tokens_BT, self.beams if self.search == "copies" else 1)
        picks = self._picks(num_steps, context, rng)
        return search(root, picks, distributions, score_dtype(context.device))

    def _logits(self, state: ModelState, context: Context, tree: BeamTree) -> Tensor:
        """Logits after the living beams, (B, n, V)."""
        if not tree.tokens_BM.shape[1]:
            logits_B1V = fitted(self._catch_up(state, context)[:, None], self.num_tokens)
            return logits_B1V.expand(-1, tree.path_BnK.shape[1], -1)
        tokens_Bn = tree.last_Bn.clamp(max=self.model.num_tokens - 1)
        return fitted(self.model.extend(state.cache, tokens_Bn, tree.nodes), self.num_tokens)

    def _distributions(self, logits_BnV: Tensor, prefix: Prefix) -> Tensor:
        return prefix.context.distribution(logits_BnV, prefix)

    def _picks(self, num_steps: int, context: Context, rng: Stream) -> list[Pick]:
        """One :data:`Pick` per step."""
        B = self.beams
        if context.distribution.greedy:
            return [keep_best(1)] * num_steps
        if self.search == "greedy":
            return [keep_best(B)] * num_steps
        u_BR = rng.uniform(Role.DRAFT, num_steps * 2 * B)
        return keep_best_of_draws(B, u_BR.unflatten(1, (num_steps, 2 * B)))


class MjgdDrafter(BeamDrafter):
    """Multi-token joint greedy decoding (MJGD) of the same paper, with the rule ``Commit``.

    Each round the *target* searches K tokens ahead, and the whole best beam is emitted. K = 1 is
    greedy decoding; K = the length of the output is full beam search. (The paper does not give B,
    and the authors published no code.) Scores are those of the softmax of the logits, bias and
    penalties included. The search treats an end-of-sequence token like any other; the output is cut
    there.

    K is the budget plus one, the number of tokens that a round may emit, since the last of them is
    drafted as well. So in an engine K is γ + 1, and less at the end of an output.

    The round's own target pass over the K tokens decides nothing. It costs one forward pass over K
    tokens for every K passes over B beams, and gives the log-probabilities of the output.

    One program runs a search of K tokens, except in exact mode: the program's bits depend on how
    many rows share it, and no other decides what is emitted.

    Args:
        model: a second ``HFModel`` around the target's own module, with a cache of its own.
        num_tokens: width of the target's logits.
        beams: B, 1 or more.
        num_fused: K of the searches that one compiled program runs; 0 if none does.

    Raises:
        InvalidParameterError: fewer than 1 beam.
    """

    DEPTH = 4  # K = 5, the most that the paper tries

    def __init__(
        self, model: HFModel, num_tokens: int, beams: int = 8, *, num_fused: int = 0
    ) -> None:
        num_fused = 0 if model.exact else num_fused
        super().__init__(model, num_tokens, beams, "greedy", num_fused=num_fused)

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        own = super().capabilities
        return replace(own, depth=self.DEPTH, max_nodes=lambda γ: own.max_nodes(γ + 1))

    def propose(self, state: ModelState, context: Context, budget: Budget, rng: Stream) -> Draft:
        tokens_B = None if budget.tokens_B is None else budget.tokens_B + 1
        return super().propose(state, context, Budget(budget.max_tokens + 1, tokens_B), rng)

    def _plan_of(self, num_steps: int) -> BeamPlan:
        return BlockPlan(num_steps, self.beams, samples=False)

    def _distributions(self, logits_BnV: Tensor, prefix: Prefix) -> Tensor:
        return prefix.context.distribution.logits(logits_BnV, prefix).softmax(-1)

    def _picks(self, num_steps: int, context: Context, rng: Stream) -> list[Pick]:
        return [keep_best(self.beams)] * num_steps

    def _is_argmax(self, context: Context) -> bool:
        return False


def _best_path(steps: Sequence[Step], tokens_B: Tensor | None) -> Tensor:
    """Nodes of the beam that is best after as many steps as the row's budget allows, (B, D);
    arbitrary beyond the budget."""
    path_BD = steps[-1].tree.path_BnK[:, 0]
    if tokens_B is None:
        return path_BD
    for depth, step in enumerate(steps[:-1], 1):
        shorter_BD = pad(step.tree.path_BnK[:, 0], (0, len(steps) - depth))
        path_BD = torch.where(tokens_B[:, None] == depth, shorter_BD, path_BD)
    return path_BD


def _along(computed: Sequence[Tensor], path_BD: Tensor) -> Tensor:
    """What each step computed after the nodes of a path, the root first, (B, N, V); zeros for the
    last node.

    Args:
        computed: of each step, one row of V numbers after each of its beams, (B, n, V).
        path_BD: the nodes.
    """
    rows_B = torch.arange(path_BD.shape[0], device=path_BD.device)
    rows, first = [computed[0][:, 0]], 0
    for step_BnV, node_B in zip(computed[1:], path_BD.unbind(1), strict=False):
        n = step_BnV.shape[1]
        rows.append(step_BnV[rows_B, (node_B - first).clamp(0, n - 1)])
        first += n
    return torch.stack([*rows, torch.zeros_like(rows[-1])], 1)


def _shares(steps: Sequence[Step], tokens_BN: Tensor, probs_BNV: Tensor) -> Tensor:
    """Of each node of a path, the likelihood of the path so far divided by that of all
    continuations that its step chose from, (B, N)."""
    q_BD = probs_BNV[:, :-1].gather(2, tokens_BN[:, 1:, None])[..., 0]
    total_BD = torch.stack([step.total_B for step in steps], 1)
    log_Q_BD = q_BD.to(total_BD.dtype).log().cumsum(1)
    return pad((log_Q_BD - total_BD).exp(), (1, 0), value=1.0)
