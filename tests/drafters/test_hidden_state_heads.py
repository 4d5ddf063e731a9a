"""Prototype: heads that draft from the target's hidden states, without a change to the package.

    Medusa   q_i = softmax of head_i(h):           Cai et al., ICML 2024
    EAGLE    q_i also reads the token before it:   Li et al., ICML 2024

h is the last hidden state of the token before the root. A prompt of one token has none.

Legend: B rows, N nodes, D drafted tokens, V vocabulary, H hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

import torch
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids
from torch import Tensor, nn

from outrider import Sampling
from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Prefix,
    Role,
    Scores,
    Stream,
    Verdict,
    argmax,
    commit_round,
    draw,
    run_round,
    start_batch,
)
from outrider.core.chain import draft_chain, with_leaf
from outrider.methods import Method
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import chi2_p_value
from outrider.verifiers import Rejection

γ = 3


@dataclass
class HeadState:
    """The hidden state behind the token before each row's root, and which rows have one."""

    hidden_BH: Tensor
    known_B: Tensor

    def keep(self, rows: Sequence[int]) -> None:
        index_B = torch.tensor(rows, dtype=torch.int64)
        self.hidden_BH, self.known_B = self.hidden_BH[index_B], self.known_B[index_B]


class HeadDrafter:
    """Drafts a chain by one linear head per depth."""

    drawn: Drawn = "iid"

    def __init__(self, target: HFModel, seed: int = 0) -> None:
        self.capabilities: Capabilities[HFModel] = Capabilities(hidden_layers=(target.num_layers,))
        self.width: int = target.module.config.hidden_size
        generator = torch.Generator().manual_seed(seed)
        shape = γ, target.num_tokens, self.width
        self.heads_DVH = torch.randn(shape, generator=generator, dtype=target.dtype)
        self.embedding: nn.Module = target.module.get_input_embeddings()

    def start(self, context: Context) -> HeadState:
        B = context.num_rows
        hidden_BH = self.heads_DVH.new_zeros(B, self.width)
        return HeadState(hidden_BH, torch.zeros(B, dtype=torch.bool))

    def read_prompt(self, state: HeadState, context: Context, hidden_BNH: Tensor, i: int) -> None:
        for b, length in enumerate(context.lengths):
            if i <= length - 2 < i + hidden_BNH.shape[1]:
                state.hidden_BH[b], state.known_B[b] = hidden_BNH[b, length - 2 - i], True

    def propose(self, state: HeadState, context: Context, budget: Budget, rng: Stream) -> Draft:
        D, distribution = budget.max_tokens, context.distribution
        if not D or not state.known_B.any():
            return Draft.root_only(context.root_B)
        u_BD = rng.uniform(Role.DRAFT, D)

        def step(tokens: Sequence[Tensor]) -> Tensor:
            read_BH = state.hidden_BH + self.embedding(tokens[-1])
            return 0.2 * read_BH @ self.heads_DVH[len(tokens) - 1].T

        def choose(z_BV: Tensor, tokens: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            q_BV = distribution(z_BV[:, None], Prefix.of_chain(context, tokens[1:]))[:, 0]
            u_B = u_BD[:, len(tokens) - 1]
            return q_BV, argmax(q_BV) if distribution.greedy else draw(q_BV, u_B)

        tokens, rows = draft_chain(context.root_B, D, step, choose)
        most_B = D if budget.tokens_B is None else budget.tokens_B
        mask_BN = torch.arange(D + 1) <= (most_B * state.known_B)[:, None]
        if distribution.greedy:
            return Draft.chain(torch.stack(tokens, 1), mask_BN, None, "chosen")
        return Draft.chain(torch.stack(tokens, 1), mask_BN, with_leaf(rows), "iid")

    def commit(self, state: HeadState, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        assert scores.hidden_BNH is not None
        last_B = verdict.num_accepted_B[:, None, None].expand(-1, 1, self.width)  # of a chain
        state.hidden_BH = scores.hidden_BNH.gather(1, last_B)[:, 0]
        state.known_B = torch.ones_like(state.known_B)

    def join(self, state: HeadState, other: HeadState) -> None:
        state.hidden_BH = torch.cat([state.hidden_BH, other.hidden_BH])
        state.known_B = torch.cat([state.known_B, other.known_B])


HEADS = Method("heads", "", "tests", "", Rejection, lambda parts: HeadDrafter(parts.target))


def test_greedy_output_is_that_of_plain_decoding() -> None:
    """Ragged rows that leave and join; some drafted tokens are accepted."""
    target, prompts = tiny(vocab_size=5), ragged_prompts([4, 1, 11], 5)
    samplings = [greedy(9), greedy(20), greedy(14)]
    found = engine_of(target, None, HEADS, γ, max_batch_size=2).generate(prompts, samplings)
    assert token_ids(found) == token_ids(engine_of(target).generate(prompts, samplings))
    assert 0 < found.stats.acceptance_rate < 1


@torch.inference_mode()
def test_sampled_output_has_the_targets_distribution() -> None:
    """CHI2 over the first three tokens of 8,000 rows. False alarms: 1e-4, for another seed."""
    model = tiny(vocab_size=3, std=0.25, dtype=torch.float64)
    drafter, prompt, B, num = HeadDrafter(model, seed=1), [0, 2, 1], 8000, 3
    target = model.with_hidden_states(drafter.capabilities.hidden_layers)
    warp = Warp([Sampling(temperature=0.9)] * B, 3)
    context = Context.start([prompt] * B, warp, [0] * B, range(B))
    (cache, state), accepted = start_batch(context, target, drafter), 0
    while min(context.lengths) < len(prompt) + num:
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, Rejection(), Budget(γ))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
        accepted += int(round_.verdict.num_accepted_B.sum())
    assert accepted > B
    sequences = list(product(range(3), repeat=num))
    p_NV = [(full_logits(model.module, [*prompt, *s]) / 0.9).softmax(-1) for s in sequences]
    pairs, first = zip(p_NV, sequences, strict=True), len(prompt) - 1
    probs_C = torch.stack([prod(p[first + i, s[i]] for i in range(num)) for p, s in pairs])
    first_BK = context.tokens_BT[:, len(prompt) : len(prompt) + num]
    index_B = (first_BK * torch.tensor([9, 3, 1])).sum(1)
    assert chi2_p_value(torch.bincount(index_B, minlength=27), probs_C) > 1e-4
