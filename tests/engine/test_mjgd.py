"""Multi-token joint greedy decoding through the engine: blocks of K tokens by beam search."""

import pytest
import torch
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.core.errors import IncompatibleError
from outrider.runtime import HFModel

PROMPTS = ragged_prompts([5, 1, 9, 3])


def mjgd(model: HFModel, beams: int, γ: int, **settings: object) -> Engine:
    return engine_of(model, None, "mjgd", γ, options={"beams": beams}, **settings)


def plain_block(model: HFModel, text: list[int], beams: int, num_tokens: int) -> list[int]:
    """The best path of a beam search that scores every path by its own forward pass."""
    living: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(num_tokens):
        found = [
            ([*path, x], score + log_p)
            for path, score in living
            for x, log_p in enumerate(
                full_logits(model.module, [*text, *path])[-1].log_softmax(-1).tolist()
            )
        ]
        living = sorted(found, key=lambda beam: -beam[1])[:beams]
    return living[0][0]


def plain_mjgd(model: HFModel, prompt: list[int], beams: int, K: int, N: int) -> tuple[int, ...]:
    text = list(prompt)
    while len(text) < len(prompt) + N:
        text += plain_block(model, text, beams, min(K, len(prompt) + N - len(text)))
    return tuple(text[len(prompt) :])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize(("K", "beams"), [(2, 3), (3, 4), (4, 1), (7, 4)])
def test_blocks_equal_those_of_a_plain_search(family: str, K: int, beams: int) -> None:
    """Rows of different lengths join and leave a batch of two; the last block is shorter."""
    model, N = tiny(family, 4, dtype=torch.float64), 10
    engine = mjgd(model, beams, K - 1, max_batch_size=2)
    found = token_ids(engine.generate(PROMPTS, [greedy(N - b) for b in range(4)]))
    for b, prompt in enumerate(PROMPTS):
        assert found[b] == plain_mjgd(model, prompt, beams, K, N - b)


def test_one_block_is_full_beam_search() -> None:
    """K >= N. In total, the outputs are more probable than those of greedy decoding."""
    model, N, beams = tiny("llama", 4, dtype=torch.float64), 8, 6
    plain = [tuple(plain_block(model, prompt, beams, N)) for prompt in PROMPTS]
    for γ in (N - 1, 30):
        engine = mjgd(model, beams, γ)
        results = engine.generate(PROMPTS, greedy(N, logprobs=0))
        assert token_ids(results) == plain
        assert all(result.stats.rounds == 1 for result in results)
    argmax = engine_of(model).generate(PROMPTS, greedy(N, logprobs=0))
    assert token_ids(argmax) != plain
    likelihoods = [[sum(r.logprobs) for r in both] for both in (results, argmax)]
    assert sum(likelihoods[0]) > sum(likelihoods[1])


@pytest.mark.parametrize("beams", [1, 5])
def test_blocks_of_one_token_are_greedy_decoding(
    beams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K = 1. Engines draft at least one token, and K is one more, so the test cuts the budget."""
    from outrider.core import Budget
    from outrider.engine import running_batch

    monkeypatch.setattr(running_batch.RunningBatch, "_budget", lambda *_: Budget(0))
    model = tiny("llama", 4, dtype=torch.float64)
    engine = mjgd(model, beams, 1)
    found = engine.generate(PROMPTS, greedy(12))
    assert found.stats.rounds == 4 * 12
    assert token_ids(found) == token_ids(engine_of(model).generate(PROMPTS, greedy(12)))


def test_one_beam_is_greedy_decoding_at_any_block_length() -> None:
    model = tiny("llama", 4)
    found = mjgd(model, 1, 5).generate(PROMPTS, greedy(20))
    assert token_ids(found) == token_ids(engine_of(model).generate(PROMPTS, greedy(20)))


def test_an_output_ends_inside_a_block() -> None:
    """At the first end-of-sequence token; the rest of the block is dropped."""
    model = tiny("llama", 4, dtype=torch.float64)
    (long,) = token_ids(mjgd(model, 4, 3).generate(PROMPTS[:1], greedy(12)))
    end = long[5]
    sampling = Sampling(temperature=0, max_new_tokens=12, stop=(end,))
    (found,) = mjgd(model, 4, 3).generate(PROMPTS[:1], sampling)
    assert found.token_ids == long[: long.index(end) + 1]


def test_it_is_defined_at_temperature_zero() -> None:
    model = tiny()
    with pytest.raises(IncompatibleError, match="temperature 0 only"):
        mjgd(model, 2, 4).generate(PROMPTS, Sampling(temperature=1))


def test_an_output_fills_the_context() -> None:
    """Up to its last token, although a round drafts one token more than its budget."""
    model = tiny("llama", 4, dtype=torch.float64)
    (prompt,) = ragged_prompts([120])
    (found,) = mjgd(model, 3, 4).generate([prompt], greedy(50))
    assert found.token_ids == plain_mjgd(model, prompt, 3, 5, model.limit - len(prompt))
    assert len(prompt) + len(found.token_ids) == model.limit


def test_it_searches_as_deep_as_the_paper_unless_told_otherwise() -> None:
    assert engine_of(tiny(), None, "mjgd", None).num_speculative_tokens == 4
    assert engine_of(tiny(), None, "mjgd", 2).num_speculative_tokens == 2
