"""Every family of models gives, through the engine, what it gives through ``transformers``."""

import pytest
import torch
from tiny_models import (
    FAMILIES,
    SLIDING,
    VOCAB,
    engine_of,
    full_logits,
    greedy,
    hf_generate,
    ragged_prompts,
    tiny,
    token_ids,
    uniform_method,
)

from outrider.core import Context, Draft, Verdict, path_to
from outrider.runtime import HFModel
from outrider.testing import SoftmaxDistribution, check_model

LENGTHS = [1, 14, 5, 23]  # the sliding windows are 8 wide
NUM = 20


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def target(family: str) -> HFModel:
    return tiny(family, name="target")


@pytest.fixture(scope="module")
def expected(target: HFModel) -> list[tuple[int, ...]]:
    """What ``transformers`` continues each prompt with, alone."""
    texts = [hf_generate(target.module, p, NUM) for p in ragged_prompts(LENGTHS)]
    assert all(len(set(text)) >= 6 for text in texts), "degenerate outputs prove nothing"
    return texts


def test_plain_batch_equals_transformers(target: HFModel, expected: list[tuple[int, ...]]) -> None:
    results = engine_of(target).generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected


@pytest.mark.parametrize("γ", [1, 3, 64])
@pytest.mark.parametrize("quality", ["good", "bad", "random"])
def test_speculative_equals_plain(
    family: str, target: HFModel, expected: list[tuple[int, ...]], quality: str, γ: int
) -> None:
    if quality == "random":
        engine = engine_of(target, None, uniform_method(), γ)
    else:
        draft = HFModel(target.module) if quality == "good" else tiny(family, seed=1)
        engine = engine_of(target, draft, γ=γ)
    results = engine.generate(ragged_prompts(LENGTHS), greedy(NUM))
    assert token_ids(results) == expected
    if quality == "good":
        assert results.stats.acceptance_rate > 0.9  # 1, up to rounding
    else:
        assert results.stats.acceptance_rate < 0.9


def test_sampled_trees_are_compacted_right(family: str) -> None:
    """Greedy verification of trees of random tokens. With 7 tokens paths off the first child are
    accepted all the time, so the cache is compacted all the time."""
    target = tiny(family, vocab_size=7)
    prompts = ragged_prompts(LENGTHS, 7)
    plain = engine_of(target).generate(prompts, greedy(NUM))
    trees = engine_of(target, None, uniform_method(width=3), γ=12).generate(prompts, greedy(NUM))
    assert token_ids(trees) == token_ids(plain)
    assert trees.stats.accepted > 10


def test_tree_scores_equal_full_passes(family: str, target: HFModel) -> None:
    """Logits of random trees in ragged rows, over several commits, against one plain forward pass
    per node over its whole path."""
    generator = torch.Generator().manual_seed(3)
    prompts = ragged_prompts([1, 6, 17, 9])
    B, N = len(prompts), 9
    context = Context.start(prompts, SoftmaxDistribution(), [0] * B, range(B))
    with torch.inference_mode():
        cache = target.start(context)
        for _ in range(3):
            parents = [[-1] + [_below(i, generator) for i in range(1, N)] for _ in range(B)]
            tokens_BN = torch.randint(VOCAB, (B, N), generator=generator)
            tokens_BN[:, 0] = context.root_B
            mask_BN = torch.ones(B, N, dtype=torch.bool)
            draft = Draft(tokens_BN, torch.tensor(parents), mask_BN, None, "chosen")
            logits_BNV = target.score(cache, draft).logits_BNV
            for b in range(B):
                committed = context.tokens_BT[b, : context.lengths[b]].tolist()
                for i in range(N):
                    path = draft.tokens_BN[b][draft.ancestors_BNN[b, i]].tolist()
                    wanted_V = full_logits(target.module, committed[:-1] + path)[-1]
                    error = (logits_BNV[b, i] - wanted_V).abs().max() / wanted_V.abs().max()
                    assert error < 1e-5
            node_B = torch.tensor([_below(N, generator) for _ in range(B)])
            depth_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
            next_B = torch.randint(VOCAB, (B,), generator=generator)
            verdict = Verdict(path_to(draft, node_B), depth_B, next_B).read()
            target.commit(cache, draft, verdict)
            context.append(verdict.emitted(draft), verdict.num_emitted)
    if family in SLIDING:
        assert max(context.lengths) > 20, "context must reach past the window of 8"


def test_contract(family: str) -> None:
    """float64 weights where the family can; some compute norms and softmax in float32 even so."""
    exact = family != "mixtral"
    model = tiny(family, dtype=torch.float64 if exact else torch.float32)
    prompts = ragged_prompts([1, 5, 3, 19])
    with torch.inference_mode():
        check_model(model, VOCAB, prompts=prompts, atol=1e-5 if exact else 1e-4)


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))
