"""Verification by several rules at once: each row of a batch by its own.

The rules verify the same drafts and read the same distributions, so each of them is called with its
rows alone, and the verdicts are put together. A row's verdict is the one that it would have in a
batch of its rule's rows.

Legend: B rows, N nodes, D drafted tokens (N-1), R rows of one rule, M divergences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Bound,
    Deferred,
    Draft,
    Drawn,
    Needs,
    Round,
    Stream,
    Verdict,
    Verifier,
)
from outrider.engine.measured_divergence import measured_divergence


class RulesByRow:
    """The rules of a batch's rows, as one rule.

    Args:
        rules: the rule of each row; all of them read distributions.
    """

    needs: Needs = "distribution"

    def __init__(self, rules: Sequence[Verifier]) -> None:
        self.rules = list(rules)
        self.rows: dict[Verifier, list[int]] = {}
        for row, rule in enumerate(self.rules):
            self.rows.setdefault(rule, []).append(row)

    @classmethod
    def of(cls, rules: Sequence[Verifier]) -> Verifier:
        """One rule for the rows: a rule itself, where it is that of all rows."""
        each = cls(rules)
        return each if len(each.rows) > 1 else each.rules[0]

    @property
    def lossless(self) -> bool:
        """Whether all rules are."""
        return all(rule.lossless for rule in self.rows)

    @property
    def accepts(self) -> frozenset[Drawn]:
        """What all rules accept."""
        each = [frozenset(rule.accepts) for rule in self.rows]
        return frozenset.intersection(*each)

    @property
    def bound(self) -> Bound:
        """A lossy rule's, where there is one; each row has its own."""
        return next((rule.bound for rule in self.rows if not rule.lossless), self.rules[0].bound)

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        B, D = len(self.rules), draft.num_nodes - 1
        path_BD = draft.tokens_BN.new_zeros(B, D)
        num_accepted_B, next_token_B = (draft.tokens_BN.new_zeros(B) for _ in range(2))
        for rule, rows in self.rows.items():
            index_R = torch.tensor(rows, device=p_BNV.device)
            stream = Stream(rng.key_B[index_R], rng.position_B[index_R])
            verdict = rule(rows_of(draft, index_R), p_BNV[index_R], stream)
            path_BD[index_R] = verdict.path_BD
            num_accepted_B[index_R] = verdict.num_accepted_B
            next_token_B[index_R] = verdict.next_token_B
        return Verdict(path_BD, num_accepted_B, next_token_B)

    def divergences(self, round_: Round) -> Tensor | None:
        """What ``measured_divergence`` finds of each lossy rule's rows, (B, D, M); zeros in the
        other rows. None where no rule is measured."""
        found_BDM = None
        for rule, rows in self.rows.items():
            index_R = torch.tensor(rows, device=round_.p_BNV.device)
            p_RNV = round_.p_BNV[index_R]
            part = round_._replace(draft=rows_of(round_.draft, index_R), p=Deferred.known(p_RNV))
            found_RDM = measured_divergence(part, rule)
            if found_RDM is None:
                continue
            if found_BDM is None:
                found_BDM = found_RDM.new_zeros(len(self.rules), *found_RDM.shape[1:])
            found_BDM[index_R] = found_RDM
        return found_BDM


def rows_of(draft: Draft, index_R: Tensor) -> Draft:
    """The draft of these rows."""
    values = {each.name: getattr(draft, each.name) for each in fields(draft) if each.init}
    parts: dict[str, Any] = {
        name: x[index_R] for name, x in values.items() if isinstance(x, Tensor)
    }
    return replace(draft, **parts)
