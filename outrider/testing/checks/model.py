"""Contract of models: scores equal those of separate runs from scratch, whatever happened before.

Legend: B rows, T context length, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core import Context, Draft, Model
from outrider.testing.checks._common import advance, random_prompts, require, verdict_at
from outrider.testing.toy import SoftmaxDistribution


def check_model(
    model: Model[Any],
    vocab_size: int,
    *,
    trees: bool = True,
    atol: float = 1e-9,
    prompts: Sequence[Sequence[int]] | None = None,
    sources: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> None:
    """Checks that score, commit, keep and join give the logits of separate runs from scratch.

    Args:
        model: the model.
        vocab_size: size of the vocabulary.
        trees: score trees in addition to chains.
        atol: maximum difference between logits that should be equal.
        prompts: the prompts of the rows; random and ragged if None.
        sources: the encoder inputs, one per prompt, for a model with an encoder.
        device: the device of the contexts.
        seed: seed of prompts and drafts.

    Raises:
        AssertionError: the message names the violated guarantee.
    """
    generator = torch.Generator().manual_seed(seed)

    def random_tokens(*shape: int) -> Tensor:
        return torch.randint(vocab_size, shape, generator=generator)

    prompts = prompts or random_prompts(vocab_size, generator)
    B = len(prompts)
    distribution = SoftmaxDistribution()
    chain_N = [-1, 0, 1, 2]
    for parents_N in [chain_N, [-1, 0, 0, 1, 1, 2, 4]] if trees else [chain_N]:
        name = "a chain" if parents_N is chain_N else "a tree"
        context = Context.start(prompts, distribution, [seed] * B, range(B), device, sources)
        cache = model.start(context)
        for round_ in range(3):
            after = "start" if round_ == 0 else f"{round_} commits"
            tokens_BN = random_tokens(B, len(parents_N)).to(device)
            draft = _draft(context, tokens_BN, parents_N)
            logits_BNV = _score(model, cache, draft)
            fresh_BNV = _from_scratch(model, context, draft)
            _equal(
                logits_BNV,
                fresh_BNV,
                draft.mask_BN,
                atol,
                f"scores of {name} after {after} differ from scoring each path from scratch",
            )
            node_B = torch.tensor([(b + round_) % len(parents_N) for b in range(B)], device=device)
            verdict = verdict_at(draft, node_B, random_tokens(B).to(device))
            model.commit(cache, draft, verdict)
            advance(context, draft, verdict)

        kept = [B - 1, *range(1, B - 1)] if B > 2 else [B - 1]
        context.keep(kept)
        context.distribution = SoftmaxDistribution()
        cache.keep(kept)
        others = None if sources is None else sources[:2]
        other = Context.start(
            prompts[:2], SoftmaxDistribution(), [seed] * 2, [7, 8], device, others
        )
        other_cache = model.start(other)
        context.join(other)
        context.distribution = SoftmaxDistribution()
        model.join(cache, other_cache)
        tokens_BN = random_tokens(len(kept) + 2, len(parents_N)).to(device)
        draft = _draft(context, tokens_BN, parents_N)
        _equal(
            _score(model, cache, draft),
            _from_scratch(model, context, draft),
            draft.mask_BN,
            atol,
            f"scores of {name} after keep and join differ from scoring each path from scratch",
        )


def _draft(context: Context, tokens_BN: Tensor, parents_N: Sequence[int]) -> Draft:
    """A chosen draft of the given shape; in row b the last ``b % 3`` nodes do not exist."""
    B, N = tokens_BN.shape
    tokens_BN = torch.cat([context.root_B[:, None], tokens_BN[:, 1:]], 1)
    node_N = torch.arange(N, device=tokens_BN.device)
    mask_BN = node_N < N - torch.arange(B, device=tokens_BN.device)[:, None] % 3
    if list(parents_N) == list(range(-1, N - 1)):
        return Draft.chain(tokens_BN, mask_BN, None, "chosen")
    parents_BN = torch.tensor(parents_N, device=tokens_BN.device).expand(B, N)
    return Draft(tokens_BN, parents_BN, mask_BN, None, "chosen")


def _score(model: Model[Any], cache: Any, draft: Draft) -> Tensor:
    logits_BNV = model.score(cache, draft).logits_BNV
    shape = tuple(logits_BNV.shape)
    require(
        len(shape) == 3 and shape[:2] == tuple(draft.tokens_BN.shape),
        f"logits have shape {shape}, expected (B, N, V) with B, N = {draft.tokens_BN.shape}",
    )
    require(not bool(logits_BNV[draft.mask_BN].isnan().any()), "logits contain NaN")
    return logits_BNV


def _from_scratch(model: Model[Any], context: Context, draft: Draft) -> Tensor:
    """Logits at every node, each from a separate run on the whole path, (B, N, V)."""
    rows = []
    for b, length in enumerate(context.lengths):
        committed = context.tokens_BT[b, :length].tolist()
        for i in range(draft.num_nodes):
            on_path_N = draft.ancestors_BNN[b, i]
            path = draft.tokens_BN[b][on_path_N].tolist()[1:]
            source = None if context.sources is None else [context.sources[b]]
            alone = Context.start(
                [committed + path], SoftmaxDistribution(), [0], [0], context.device, source
            )
            root_only = Draft.root_only(alone.root_B)
            rows.append(model.score(model.start(alone), root_only).logits_BNV[0, 0])
    return torch.stack(rows).view(*draft.tokens_BN.shape, -1)


def _equal(a: Tensor, b: Tensor, mask_BN: Tensor, atol: float, message: str) -> None:
    a, b = a[mask_BN].double(), b[mask_BN].double()
    difference = torch.where(a == b, 0.0, (a - b).abs())
    worst = float(difference.max())
    require(worst <= atol, f"{message} (by up to {worst:.3g}, allowed {atol:.3g})")
