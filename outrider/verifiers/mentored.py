"""Mentored decoding: accepts as much as a per-token divergence budget allows.

Tran-Thien, "An optimal lossy variant of speculative decoding", 2023 (a blog post with an attached
proof; it writes q for the target and p for the draft). Among all distributions π with
KL(p‖π) <= D, the one with the highest acceptance is a clamp of q, and the following rule emits it:

    accept x ~ q   iff   u α q(x) < p(x)
    else           p <- norm(max(p/β - q, 0))
    π = clamp(q, p/β, p/α),   α <= 1 <= β,   Σ max(q - p/α, 0) = Σ max(p/β - q, 0)

α is as small as D permits; ``clamp.py`` computes it. D = 0 is rejection sampling, and D >= KL(p‖q)
accepts everything. The same family of distributions is optimal for other divergences between p and
π, so the budget may also limit KL(π‖p), total variation or χ²(p‖π).

Departures from the author's code: that code stops anywhere between 0.8 D and 1.2 D, computes β with
an index that is one too low, and adds 1e-12 to both distributions. Here the divergence reaches D
within a millionth and never exceeds it. ``bracket="blog"`` restores the wide tolerance (but stays
below 1.2 D, with the correct β). Tokens outside the target's support are rejected at every D unless
``allow_off_support`` is set.

Preserves: the divergence between target and output is at most D for every token; for the KL
divergences, at most n D for n tokens. Accepts chains, i.i.d. or chosen.

Legend: B rows, N nodes, D drafted tokens (N-1), R rows to solve (the others accept under rejection
sampling already), X nodes of all rows (B·N), V vocabulary; leading dimensions broadcast.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from outrider.core import (
    Bound,
    Divergence,
    Draft,
    Drawn,
    Needs,
    Role,
    Stream,
    Verdict,
    draw,
    repeat_while,
    require_chain,
    rows_of,
    walk,
)
from outrider.core.errors import InvalidParameterError
from outrider.core.recording import is_captured
from outrider.verifiers.clamp import Clamp, sorted_path
from outrider.verifiers.rejection import Rejection
from outrider.verifiers.zoom import zoom

Bracket = Literal["exact", "blog"]

_LARGE = 8192  # vocabularies from this size on are solved without sorting
_MOST_AT_ONCE = 2**20  # probabilities that captured code sorts at a time: 200 MB

_WORDS = {"kl": "KL(p‖π)", "rkl": "KL(π‖p)", "tv": "TV(p, π)", "chi2": "χ²(p‖π)"}


@dataclass(frozen=True)
class Mentored:
    """Optimal lossy verification under a divergence budget (Tran-Thien).

    Attributes:
        budget: D, upper bound on the divergence between target and output for every token.
        divergence: which divergence.
        allow_off_support: spend any remaining budget on tokens that have probability zero under the
            truncated target.
        bracket: how closely D is met: ``exact``, or within the author's 0.8 D … 1.2 D (KL only).

    Raises:
        InvalidParameterError: an option outside its domain, or a combination without meaning.
    """

    budget: float = 0.1
    divergence: Divergence = "kl"
    allow_off_support: bool = False
    bracket: Bracket = "exact"
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "distribution"
    traceable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.budget < math.inf:
            raise InvalidParameterError(f"budget={self.budget!r}: must be finite and at least 0")
        if self.divergence not in get_args(Divergence):
            raise InvalidParameterError(
                f"divergence={self.divergence!r}: must be one of {', '.join(get_args(Divergence))}"
            )
        if self.bracket not in get_args(Bracket):
            raise InvalidParameterError(
                f"bracket={self.bracket!r}: must be one of {', '.join(get_args(Bracket))}"
            )
        if self.bracket == "blog" and self.divergence != "kl":
            raise InvalidParameterError(
                f"bracket={self.bracket!r}: must be 'exact' with divergence={self.divergence!r}; "
                "the author's search is for 'kl'"
            )
        if self.allow_off_support and self.divergence == "rkl":
            raise InvalidParameterError(
                f"allow_off_support={self.allow_off_support!r}: must be False with "
                "divergence='rkl', which is infinite for any token outside the target's support"
            )

    @property
    def bound(self) -> Bound:
        limit = 1.2 * self.budget if self.bracket == "blog" else self.budget
        words = f"{_WORDS[self.divergence]} of target p and output π at most {limit:g} per token"
        return Bound(words, self.divergence, limit)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        """Verifies a batch of chains.

        Raises:
            IncompatibleError: the draft has branches.
        """
        require_chain(self, draft)
        B, N = draft.tokens_BN.shape
        if self.budget == 0 or N == 1:
            return walk(Rejection(), draft, p_BNV, rng)
        x_BD, q_BNV = draft.tokens_BN[:, 1:], draft.probs_BNV
        q_BDV = None if q_BNV is None else q_BNV[:, :-1]
        u_BD = rng.uniform(Role.ACCEPT, N - 1)
        accepted_BD = Rejection().accept(p_BNV[:, :-1], q_BDV, x_BD, u_BD)
        find = self._all_at_once if is_captured() else self._from_the_first
        accepted_BD, rejected_B, b_B = find(draft, p_BNV, accepted_BD, u_BD)
        num_B = (accepted_BD & draft.mask_BN[:, 1:]).long().cumprod(1).sum(1)

        rows_B = torch.arange(B, device=p_BNV.device)
        p_BV, stop_B = p_BNV[rows_B, num_B], num_B.clamp(max=N - 2)
        q_BV = None if q_BDV is None else q_BDV[rows_B, stop_B]
        left_BV = _residual(p_BV, q_BV, x_BD[rows_B, stop_B], b_B)
        emptied_B = left_BV.sum(1) == 0  # rounding may leave no mass
        probs_BV = torch.where((rejected_B & ~emptied_B)[:, None], left_BV, p_BV)
        path_BD = torch.arange(1, N, device=p_BNV.device).expand(B, N - 1)
        return Verdict(path_BD, num_B, draw(probs_BV, rng.uniform(Role.NEXT, 1)[:, 0]))

    def _from_the_first(
        self, draft: Draft, p_BNV: Tensor, accepted_BD: Tensor, u_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Decides about the tokens that rejection sampling rejects, as far as each row gets.
        Returns which tokens are accepted, (B, D), whether a row stops at a rejected one, (B,), and
        1/β there, (B,)."""
        N, x_BD, q_BNV = draft.num_nodes, draft.tokens_BN[:, 1:], draft.probs_BNV
        q_XV = None if q_BNV is None else q_BNV.flatten(0, 1)
        exists_BD, num_drafted_B = draft.mask_BN[:, 1:], draft.num_drafted_B

        def reached(accepted_BD: Tensor, rejected_B: Tensor) -> tuple[Tensor, Tensor]:
            """The tokens accepted so far, and whether the next one has yet to be solved for."""
            num_B = (accepted_BD & exists_BD).long().cumprod(1).sum(1)
            return num_B, ~rejected_B & (num_B < num_drafted_B)

        def some_row_is_open(accepted_BD: Tensor, rejected_B: Tensor, _: Tensor) -> Tensor:
            return reached(accepted_BD, rejected_B)[1].any()

        def relax(
            accepted_BD: Tensor, rejected_B: Tensor, b_B: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            num_B, open_B = reached(accepted_BD, rejected_B)
            row_R = rows_of(open_B)
            open_R = open_B[row_R]
            at_R = torch.where(open_R, num_B[row_R], 0)
            x_R, u_R, was_R = (each[row_R, at_R] for each in (x_BD, u_BD, accepted_BD))
            node_R = row_R * N + at_R
            p_RV = p_BNV.flatten(0, 1).index_select(0, node_R)
            q_RV = None if q_XV is None else q_XV.index_select(0, node_R)
            accepted_R, b_R = self._relax(p_RV, q_RV, x_R, u_R)
            accepted_R = torch.where(open_R, accepted_R, was_R)
            b_R = torch.where(open_R, b_R, b_B[row_R])
            return (
                accepted_BD.index_put((row_R, at_R), accepted_R),
                rejected_B.index_put((row_R,), rejected_B[row_R] | (open_R & ~accepted_R)),
                b_B.index_put((row_R,), b_R),
            )

        # Only positions that the chain reaches are solved: the first rejection of every row and, if
        # the budget overturns it, the next one. Each iteration synchronises; there are at most N-1.
        none_B = torch.zeros_like(draft.mask_BN[:, 0])
        ones_B = torch.ones_like(none_B, dtype=torch.float64)
        accepted_BD, rejected_B, b_B = repeat_while(
            some_row_is_open, relax, (accepted_BD, none_B, ones_B)
        )
        return accepted_BD, rejected_B, b_B

    def _all_at_once(
        self, draft: Draft, p_BNV: Tensor, accepted_BD: Tensor, u_BD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same in captured code: solves all positions, whether rows get there or not. Many
        positions at a time take as many kernels as one."""
        B, N, V = p_BNV.shape
        x_BD, q_BNV = draft.tokens_BN[:, 1:], draft.probs_BNV
        size = max(_MOST_AT_ONCE // (B * V), 1)

        def relaxed(first: int) -> tuple[Tensor, ...]:
            at = slice(first, min(first + size, N - 1))
            p_RV = p_BNV[:, at].flatten(0, 1)
            q_RV = None if q_BNV is None else q_BNV[:, at].flatten(0, 1)
            found = self._relax(p_RV, q_RV, x_BD[:, at].flatten(), u_BD[:, at].flatten())
            return tuple(each_R.view(B, -1) for each_R in found)

        parts = zip(*map(relaxed, range(0, N - 1, size)), strict=True)
        relaxed_BD, b_BD = (torch.cat(each, 1) for each in parts)
        accepted_BD = accepted_BD | relaxed_BD
        num_B = (accepted_BD & draft.mask_BN[:, 1:]).long().cumprod(1).sum(1)
        b_B = b_BD.gather(1, num_B.clamp(max=N - 2)[:, None])[:, 0]
        return accepted_BD, num_B < draft.num_drafted_B, b_B

    def accept(self, p_V: Tensor, q_V: Tensor | None, x: Tensor, u: Tensor) -> Tensor:
        """``u α q(x) < p(x)``. α <= 1 is only computed where rejection sampling rejects x."""
        accepted = Rejection().accept(p_V, q_V, x, u)
        if self.budget == 0:
            return accepted
        rejected = ~accepted
        q_RV = None if q_V is None else q_V[rejected]
        return accepted.masked_scatter(
            rejected, self._relax(p_V[rejected], q_RV, x[rejected], u[rejected])[0]
        )

    def _relax(
        self, p_RV: Tensor, q_RV: Tensor | None, x_R: Tensor, u_R: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Whether candidates that rejection sampling rejects are accepted after all, and 1/β."""
        clamp = self.solve(p_RV, q_RV, x_R)
        p_R = p_RV.gather(1, x_R[:, None])[:, 0]
        q_R = 1.0 if q_RV is None else q_RV.gather(1, x_R[:, None])[:, 0]
        on_R = u_R * clamp.alpha_R * q_R < p_R
        off_R = (p_R == 0) & (u_R < clamp.off_R)
        return on_R | off_R, clamp.b_R

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        """``min(1, p/(α q))``."""
        if self.budget == 0:
            return Rejection().acceptance(p_V, q_V)
        clamp = self.solve(*_rows(p_V, q_V), None)
        alpha, off = (x_R.view(p_V.shape[:-1])[..., None] for x_R in (clamp.alpha_R, clamp.off_R))
        r_V = torch.where(alpha * q_V > p_V, p_V / (alpha * q_V), 1.0)
        return torch.where((p_V == 0) & (q_V > 0), off, r_V).to(p_V.dtype)

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual ``max(p/β - q, 0)``, unnormalised."""
        if self.budget == 0 or q_V is None:
            return Rejection().reject(p_V, q_V, x)
        clamp = self.solve(*_rows(p_V, q_V), None)
        return _residual(p_V, q_V, x, clamp.b_R.view(p_V.shape[:-1])), q_V

    def solve(self, p_RV: Tensor, q_RV: Tensor | None, x_R: Tensor | None) -> Clamp:
        """The clamp of each row. For a chosen x (``q_RV`` is None), the vocabulary is reduced to
        two tokens: x and all others."""
        if q_RV is None:
            assert x_R is not None
            p_R1 = p_RV.double().gather(1, x_R[:, None]).clamp(max=1)
            p_RV = torch.cat([p_R1, 1 - p_R1], 1)
            q_RV = torch.cat([torch.ones_like(p_R1), torch.zeros_like(p_R1)], 1)
        if self._sorts(p_RV.shape[1]):
            return self._by_sorting(p_RV, q_RV)

        def some_row_is_left(*state: Tensor) -> Tensor:
            return ~state[-1].all()

        def by_sorting(*state: Tensor) -> tuple[Tensor, ...]:
            *clamp, exact_R = state
            left_R = rows_of(~exact_R)
            kept_R = exact_R[left_R]
            sorted_ = self._by_sorting(p_RV[left_R], q_RV[left_R])
            solved = (
                x_R.index_copy(0, left_R, torch.where(kept_R, x_R[left_R], y_R))
                for x_R, y_R in zip(clamp, sorted_, strict=True)
            )
            return *solved, torch.ones_like(exact_R)

        clamp, exact_R = zoom(self.divergence, p_RV, q_RV, self.budget)
        alpha_R, b_R, off_R, _ = repeat_while(some_row_is_left, by_sorting, (*clamp, exact_R))
        return Clamp(alpha_R, b_R, off_R)

    def _sorts(self, num_tokens: int) -> bool:
        """Whether it solves by sorting, as captured code always does: the solver without sorting
        reads how many tokens it selects."""
        only = self.bracket == "blog" or self.allow_off_support
        return only or num_tokens < _LARGE or is_captured()

    def _by_sorting(self, p_RV: Tensor, q_RV: Tensor) -> Clamp:
        path = sorted_path(self.divergence, p_RV, q_RV, self.allow_off_support)
        search = path.exact if self.bracket == "exact" else path.blog
        return path.clamp(search(self.budget))


def _residual(p_V: Tensor, q_V: Tensor | None, x: Tensor, b: Tensor) -> Tensor:
    """``max(p/β - q, 0)``, with b = 1/β. After a chosen x it is proportional to p without x."""
    if q_V is None:
        return p_V.scatter(-1, x[..., None], 0.0)
    return torch.addcmul(-q_V, b[..., None].to(p_V.dtype), p_V).clamp_(min=0)


def _rows(p_V: Tensor, q_V: Tensor) -> tuple[Tensor, Tensor]:
    V = p_V.shape[-1]
    return p_V.reshape(-1, V), q_V.expand_as(p_V).reshape(-1, V)
