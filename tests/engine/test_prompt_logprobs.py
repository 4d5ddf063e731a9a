"""Log-probabilities of a prompt's own tokens equal those of one plain forward pass."""

import pytest
import torch
from tiny_models import engine_of, full_logits, ragged_prompts, tiny, tiny_module
from tiny_seq2seq import tiny_seq2seq

from outrider.core.errors import PromptError
from outrider.runtime import HFModel
from outrider.runtime.hf import adapter


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
@pytest.mark.parametrize("width", [4, 512])
def test_they_are_those_of_one_plain_pass(
    family: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter, "PREFILL_WIDTH", width)
    module = tiny_module(family, dtype=torch.float64)
    (prompt,) = ragged_prompts([23])
    found = engine_of(HFModel(module, name="model"), prefix_cache="1MiB").prompt_logprobs(prompt, 3)
    logprobs_TV = full_logits(module, prompt).log_softmax(-1)
    expected = [logprobs_TV[t, prompt[t + 1]].item() for t in range(22)]
    assert found.logprobs == pytest.approx(expected, abs=1e-5)
    best = logprobs_TV[:22].topk(3)
    assert [each.token_ids for each in found.top] == [tuple(row) for row in best.indices.tolist()]


def test_the_most_probable_token_has_the_same_number_in_both_places() -> None:
    (prompt,) = ragged_prompts([12])
    found = engine_of(tiny()).prompt_logprobs(prompt, 101)
    for token, logprob, top in zip(prompt[1:], found.logprobs, found.top, strict=True):
        assert dict(zip(top.token_ids, top.logprobs, strict=True))[token] == logprob


def test_a_prompt_of_one_token_has_none() -> None:
    assert engine_of(tiny()).prompt_logprobs([5], 2).logprobs == ()


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(PromptError, match="encoder-decoder"):
        engine_of(tiny_seq2seq()).prompt_logprobs([5, 6])
