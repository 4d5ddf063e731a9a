"""Log-probabilities of continuations, and perplexity: against closed forms and transformers."""

import math

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, full_logits, ragged_prompts, tiny, tiny_module
from tiny_seq2seq import tiny_seq2seq_module

from outrider.core.errors import NonFiniteLogitsError, PromptError
from outrider.lab.quality import logprobs as module_under_test
from outrider.lab.quality.logprobs import continuation_logprobs
from outrider.lab.quality.perplexity import output_perplexity
from outrider.runtime import HFModel
from outrider.runtime.hf.seq2seq import Seq2SeqModel

PROMPTS = ragged_prompts([3, 1, 17, 6])
CONTINUATIONS = ragged_prompts([9, 4, 1, 30], seed=1)
PAIRS = list(zip(PROMPTS, CONTINUATIONS, strict=True))


def uniform_model() -> HFModel:
    """A model whose distribution is uniform at every position: its head is zero."""
    module = tiny_module()
    with torch.no_grad():
        module.get_output_embeddings().weight.zero_()
    return HFModel(module)


def bigram_model() -> HFModel:
    """A model whose distribution depends on the last token alone: token t is followed by t + 1 with
    probability e² / (e² + VOCAB - 1), and by each other token with 1 / (e² + VOCAB - 1)."""
    module = tiny_module(hidden_size=VOCAB, num_attention_heads=1, num_key_value_heads=1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "layers" in name and "norm" not in name:
                parameter.zero_()  # layers add nothing, so the final norm reads the embedding
        module.get_input_embeddings().weight.copy_(torch.eye(VOCAB))
        head = torch.eye(VOCAB).roll(1, 0) * 2 / math.sqrt(VOCAB)  # the norm scales by √VOCAB
        module.get_output_embeddings().weight.copy_(head)
        module.model.norm.variance_epsilon = 0.0
    return HFModel(module)


def test_perplexity_of_a_uniform_model_is_its_vocabulary() -> None:
    found = output_perplexity(uniform_model(), PAIRS)
    assert found.micro == pytest.approx(VOCAB, rel=1e-5)
    assert found.macro == pytest.approx(VOCAB, rel=1e-5)
    assert found.num_tokens == 44


def test_perplexity_of_a_bigram_model_in_closed_form() -> None:
    """Two outputs of unequal length distinguish micro from macro."""
    mass = math.exp(2) + VOCAB - 1
    follows, other = -math.log(math.exp(2) / mass), -math.log(1 / mass)
    outputs = [([5], [6, 7, 8, 9]), ([40, 3], [4, 50])]
    found = output_perplexity(bigram_model(), outputs)
    assert found.nats == pytest.approx([follows, (follows + other) / 2], rel=1e-5)
    assert found.micro == pytest.approx(math.exp((5 * follows + other) / 6), rel=1e-5)
    assert found.macro == pytest.approx(math.exp((3 * follows + other) / 4), rel=1e-5)
    assert found.micro != pytest.approx(found.macro, rel=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_equal_those_of_one_plain_pass(family: str) -> None:
    """Ragged prompts and continuations share batches; padding must enter no result."""
    module = tiny_module(family)
    scored = continuation_logprobs(HFModel(module), PAIRS, batch_size=3)
    for (prompt, continuation), found in zip(PAIRS, scored, strict=True):
        logits_TV = full_logits(module, [*prompt, *continuation])[len(prompt) - 1 : -1]
        logprobs_TV = logits_TV.double().log_softmax(-1)
        tokens_T = torch.tensor(continuation)
        expected = logprobs_TV.gather(1, tokens_T[:, None])[:, 0].tolist()
        assert found.logprobs == pytest.approx(expected, abs=1e-3)
        assert found.greedy == bool((logits_TV.argmax(-1) == tokens_T).all())


def test_perplexity_is_the_exponential_of_the_loss_of_transformers() -> None:
    module = tiny_module()
    prompt, continuation = PROMPTS[2], CONTINUATIONS[3]
    ids = torch.tensor([[*prompt, *continuation]])
    labels = ids.clone()
    labels[:, : len(prompt)] = -100
    with torch.no_grad():
        loss = module(input_ids=ids, labels=labels).loss.item()
    found = output_perplexity(HFModel(module), [(prompt, continuation)])
    assert math.log(found.micro) == pytest.approx(loss, abs=1e-3)


def test_logprobs_do_not_depend_on_the_width_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny()
    whole = continuation_logprobs(model, PAIRS)
    monkeypatch.setattr(module_under_test, "_MOST_LOGITS", 1)  # one token per pass
    by_token = continuation_logprobs(model, PAIRS)
    for one, other in zip(whole, by_token, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.greedy == other.greedy


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_logprobs_of_an_encoder_decoder(family: str) -> None:
    model = Seq2SeqModel(tiny_seq2seq_module(family))
    for (prompt, continuation), found in zip(
        PAIRS, continuation_logprobs(model, PAIRS), strict=True
    ):
        expected = [
            model.logits_after(prompt, continuation[:n])
            .detach()
            .double()
            .log_softmax(-1)[continuation[n]]
            .item()
            for n in range(len(continuation))
        ]
        assert found.logprobs == pytest.approx(expected, abs=1e-3)


def test_a_continuation_may_fill_the_context() -> None:
    model = tiny()
    prompt, continuation = ragged_prompts([100, 29])
    assert len(continuation_logprobs(model, [(prompt, continuation)])[0].logprobs) == 29
    with pytest.raises(PromptError, match="the context"):
        continuation_logprobs(model, [([*prompt, 1], continuation)])


def test_a_greedy_continuation_is_recognised() -> None:
    module = tiny_module()
    prompt, best = [5, 6], []
    for _ in range(6):
        best.append(int(full_logits(module, [*prompt, *best])[-1].argmax()))
    worse = [*best[:-1], (best[-1] + 1) % VOCAB]
    first, second = continuation_logprobs(HFModel(module), [(prompt, best), (prompt, worse)])
    assert first.greedy
    assert not second.greedy
    assert second.logprobs[:-1] == pytest.approx(first.logprobs[:-1])


def test_outputs_without_tokens_count_in_no_average() -> None:
    model = uniform_model()
    found = output_perplexity(model, [([1], []), ([1], [2, 3])])
    assert found.macro == pytest.approx(VOCAB, rel=1e-5)
    assert math.isnan(found.nats[0])
    assert math.isnan(output_perplexity(model, [([1], [])]).micro)
    assert math.isnan(output_perplexity(model, []).macro)


def test_bad_pairs_are_named() -> None:
    model = tiny()
    with pytest.raises(PromptError, match="prompt 1 is empty"):
        continuation_logprobs(model, [([1], [2]), ([], [2])])
    with pytest.raises(PromptError, match=f"token id {VOCAB} of pair 0"):
        continuation_logprobs(model, [([1], [VOCAB])])


def test_a_damaged_model_is_an_error() -> None:
    module = tiny_module()
    with torch.no_grad():
        module.get_output_embeddings().weight[3] = math.nan
    with pytest.raises(NonFiniteLogitsError):
        continuation_logprobs(HFModel(module), PAIRS)
