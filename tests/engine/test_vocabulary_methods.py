"""Methods for draft models with other vocabularies, through the engine, and who may use them."""

import pytest
import torch
from real_tokenizers import model, tokenizer
from tiny_models import engine_of, greedy, tiny, token_ids
from tiny_seq2seq import tiny_seq2seq_module

from outrider import Sampling, load
from outrider.core.errors import VocabularyMismatchError
from outrider.methods import Method
from outrider.methods.vocabularies import VOCABULARIES
from outrider.runtime import HFModel
from outrider.runtime.hf.seq2seq import Seq2SeqModel

PROMPTS = ["The quick brown fox", "x"]
METHODS = pytest.mark.parametrize("method", VOCABULARIES, ids=lambda method: method.name)


def encoder_decoder(family: str, kind: str, seed: int, std: float = 0.2) -> HFModel:
    words = tokenizer(kind)
    start = {"decoder_start_token_id": words.eos_token_id}
    module = tiny_seq2seq_module(family, seed, torch.float64, std, vocab_size=len(words), **start)
    return Seq2SeqModel(module, words, f"{family} {kind}")


@pytest.mark.parametrize(
    ("method", "family", "kind"),
    [(VOCABULARIES[0], "bart", "unigram"), (VOCABULARIES[1], "t5", "byte-small")],
    ids=["tli", "slem"],
)
def test_encoder_decoders(method: Method, family: str, kind: str) -> None:
    """The draft's encoder gets the source in its own tokens; rows join and leave."""
    target, draft = encoder_decoder("t5", "byte", 0), encoder_decoder(family, kind, 1)
    sampling = [greedy(7), Sampling(max_new_tokens=5, ignore_eos=True)]
    both, alone = (
        engine_of(target, draft, method, max_batch_size=size).generate(PROMPTS, sampling)
        for size in (2, 1)
    )
    assert token_ids(both) == token_ids(alone)
    plain = engine_of(target).generate(PROMPTS[:1], greedy(7))
    assert token_ids(both)[0] == token_ids(plain)[0]
    assert both.stats.drafted > 5


def test_equal_encoder_decoders_are_speculative_decoding() -> None:
    target, draft = (encoder_decoder("t5", "byte", 0, std) for std in (0.2, 0.19))
    sampling = Sampling(max_new_tokens=12, ignore_eos=True)
    expected = engine_of(target, draft, "speculative").generate(PROMPTS, sampling)
    results = engine_of(target, draft, VOCABULARIES[0]).generate(PROMPTS, sampling)
    assert token_ids(results) == token_ids(expected)
    assert results.stats.accepted == expected.stats.accepted > 3


@METHODS
def test_the_end_of_an_output(method: Method) -> None:
    """The target's end-of-text token ends it, whatever the draft's end token is."""
    target, draft = model("byte"), model("unigram", 1)
    end = tokenizer("byte").eos_token_id
    sampling = Sampling(temperature=0, max_new_tokens=9, logit_bias={end: 99.0})
    result = engine_of(target, draft, method).generate(PROMPTS[0], sampling)
    assert (result.token_ids, result.finish_reason) == ((end,), "eos")


def test_other_methods_name_those_that_support_it() -> None:
    with pytest.raises(VocabularyMismatchError, match=r"different vocabularies.*'tli' or 'slem'"):
        load(model("byte"), model("unigram"))


@METHODS
def test_models_without_tokenizers(method: Method) -> None:
    for pair in ((tiny(), model("byte")), (model("byte"), tiny())):
        with pytest.raises(VocabularyMismatchError, match=r"has no tokenizer.*HFModel\(") as caught:
            engine_of(*pair, method)
        assert "\n" not in str(caught.value)
