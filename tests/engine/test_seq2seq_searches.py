"""Searches on encoder-decoders: one encoder pass per source, and beams in the decoder.

Legend: T tokens of the decoder, V vocabulary.
"""

import re
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, engine_of, greedy, ragged_prompts, tiny, token_ids
from tiny_seq2seq import decoder_logits, tiny_seq2seq, tiny_seq2seq_module
from transformers import PreTrainedModel

from outrider import Sampling, beam_search
from outrider.core.errors import IncompatibleError, PromptError
from outrider.drafters.search.beam_search import Hypothesis
from outrider.runtime import Seq2SeqModel

SOURCES = ragged_prompts([7, 3, 11, 5], seed=4)
SAMPLING = Sampling(
    temperature=0.9, top_k=40, repetition_penalty=1.2, max_new_tokens=12, ignore_eos=True
)
DRAFTED, ALONE = ("mjsd", "mtad"), ("mjgd", "beam-search")
FAMILIES = pytest.mark.parametrize("family", ["t5", "bart"])


def wide(family: str, seed: int = 0, std: float = 0.2) -> Seq2SeqModel:
    return tiny_seq2seq(family, seed, dtype=torch.float64, std=std)


def by_transformers(
    module: PreTrainedModel, source: list[int], num_beams: int, num: int, **settings: Any
) -> list[Hypothesis]:
    """All hypotheses of its search, without the start token and without tokens after an end."""
    ids = torch.tensor([source])
    ends = settings.get("eos_token_id", module.generation_config.eos_token_id) or []
    done = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        max_new_tokens=num,
        do_sample=False,
        use_cache=False,
        num_return_sequences=num_beams,
        return_dict_in_generate=True,
        output_scores=True,
        pad_token_id=0,
        **settings,
    )
    hypotheses = []
    for line, score in zip(done.sequences.tolist(), done.sequences_scores.tolist(), strict=True):
        last = next((i for i, token in enumerate(line) if i and token in ends), len(line))
        hypotheses.append(Hypothesis(score, tuple(line[1 : last + 1])))
    return hypotheses


def plain_block(
    model: Seq2SeqModel, source: list[int], text: list[int], beams: int, K: int
) -> list[int]:
    """The best path of a beam search of K tokens that scores every path by its own pass."""
    living: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(K):
        found = []
        for path, score in living:
            last_V = decoder_logits(model.module, source, [*model.decoder_prompt, *text, *path])[-1]
            found += [
                ([*path, x], score + s) for x, s in enumerate(last_V.log_softmax(-1).tolist())
            ]
        living = sorted(found, key=lambda beam: -beam[1])[:beams]
    return living[0][0]


@FAMILIES
@pytest.mark.parametrize("length_penalty", [1.0, -0.8])
def test_beam_search_equals_transformers(family: str, length_penalty: float) -> None:
    """Hypothesis for hypothesis; some end early, and the long ones make the tree be compacted."""
    model, lengths = wide(family), set()
    for source in SOURCES:
        free = beam_search(
            model, model.decoder_prompt, 6, 4, num_return_sequences=6, source_ids=source
        )
        ends = sorted({h.token_ids[2] for h in free})[:2]
        mine = beam_search(
            model, model.decoder_prompt, 4, 30, length_penalty, False, ends, 4, source_ids=source
        )
        theirs = by_transformers(
            model.module, source, 4, 30, length_penalty=length_penalty, eos_token_id=ends
        )
        assert [h.token_ids for h in mine] == [h.token_ids for h in theirs]
        scores = [h.score for h in theirs]
        assert [h.score for h in mine] == pytest.approx(scores, rel=1e-6, abs=1e-4)
        lengths |= {len(h.token_ids) for h in mine}
    assert len(lengths) > 2


@FAMILIES
def test_beam_search_through_the_engine(family: str) -> None:
    """Each row reads its own source; rows come and go in a batch of two."""
    model = wide(family)
    engine = engine_of(model, None, "beam-search", 3, options={"num_beams": 3}, max_batch_size=2)
    found = token_ids(engine.generate(SOURCES, [greedy(14 - 3 * b) for b in range(4)]))
    for b, source in enumerate(SOURCES):
        (best,) = beam_search(model, model.decoder_prompt, 3, 14 - 3 * b, source_ids=source)
        assert found[b] == best.token_ids
    assert token_ids(engine_of(model).generate(SOURCES, greedy(14)))[0] != found[0]


DEMANDS: dict[str, dict[str, Any]] = {
    "tokens": {"forced_bos_token_id": 5, "forced_eos_token_id": 9, "suppress_tokens": [76, 71]},
    "n-grams": {"no_repeat_ngram_size": 2, "encoder_no_repeat_ngram_size": 1},
    "lengths": {"min_new_tokens": 7, "eos_token_id": list(range(40))},
}


@pytest.mark.parametrize("demand", DEMANDS)
def test_beam_search_obeys_the_models_rules(demand: str) -> None:
    module = tiny_seq2seq_module("mbart", dtype=torch.float64)
    free = [by_transformers(module, source, 3, 10)[0].token_ids for source in SOURCES]
    for field, value in DEMANDS[demand].items():
        setattr(module.generation_config, field, value)
    expected = [by_transformers(module, source, 3, 10)[0].token_ids for source in SOURCES]
    assert expected != free, "the demand must matter here"
    engine = engine_of(Seq2SeqModel(module), None, "beam-search", options={"num_beams": 3})
    found = engine.generate(SOURCES, Sampling(temperature=0, max_new_tokens=10))
    assert token_ids(found) == expected


@FAMILIES
def test_blocks_of_joint_greedy_decoding(family: str) -> None:
    """They equal those of the plain search, three tokens at a time; the last block is shorter."""
    model = wide(family)
    engine = engine_of(model, None, "mjgd", 2, options={"beams": 3}, max_batch_size=2)
    found = token_ids(engine.generate(SOURCES, [greedy(8 - b) for b in range(4)]))
    for b, source in enumerate(SOURCES):
        text: list[int] = []
        while len(text) < 8 - b:
            text += plain_block(model, source, text, 3, min(3, 8 - b - len(text)))
        assert found[b] == tuple(text)


@FAMILIES
@pytest.mark.parametrize("method", DRAFTED)
def test_a_draft_by_the_target_itself_is_fully_accepted(method: str, family: str) -> None:
    model = wide(family)
    engine = engine_of(model, model, method, 3, options={"tau": 0.99})
    for result in engine.generate(SOURCES, SAMPLING):
        assert result.stats.acceptance_length == 4


@FAMILIES
@pytest.mark.parametrize("method", [*DRAFTED, *ALONE])
def test_an_output_does_not_depend_on_its_batch(method: str, family: str) -> None:
    """Nor does its acceptance; the draft model is of the other family."""
    target, draft = wide(family), wide("bart" if family == "t5" else "t5", 1)
    sampling = greedy(12) if method in ALONE else SAMPLING
    options = {"tau": 0.1} if method in DRAFTED else {}
    both, alone = (
        engine_of(target, draft, method, 3, options=options, max_batch_size=size).generate(
            SOURCES, sampling
        )
        for size in (3, 1)
    )
    assert token_ids(both) == token_ids(alone)
    assert both.stats.accepted == alone.stats.accepted > 0


@pytest.mark.parametrize("method", [*DRAFTED, *ALONE])
def test_log_probabilities_equal_those_of_a_full_forward_pass(method: str) -> None:
    target = wide("t5")
    sampling = greedy(9, logprobs=1)
    for result in engine_of(target, wide("t5", std=0.19), method, 3).generate(SOURCES, sampling):
        text = [*target.decoder_prompt, *result.token_ids]
        own_TV = decoder_logits(target.module, result.prompt_ids, text)[:-1].log_softmax(-1)
        own_T = own_TV.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        assert list(result.logprobs) == pytest.approx(own_T.tolist(), abs=1e-6)


@pytest.mark.parametrize("method", [*DRAFTED, *ALONE])
def test_an_output_fills_the_decoders_context(method: str) -> None:
    """And a source fills the encoder's, although searches need additional slots."""
    target, draft = (tiny_seq2seq("bart", i, max_position_embeddings=16) for i in range(2))
    (result,) = engine_of(target, draft, method, 4).generate([[5] * 16], greedy(50))
    assert (len(result.token_ids), result.finish_reason) == (15, "context")


@pytest.mark.parametrize("method", ALONE)
def test_the_targets_own_searches_are_for_temperature_zero(method: str) -> None:
    with pytest.raises(IncompatibleError, match=f"'{method}' is defined at temperature 0 only"):
        engine_of(wide("t5"), None, method).generate(SOURCES, SAMPLING)


def test_a_search_needs_a_source_if_the_model_has_an_encoder() -> None:
    """And accepts none otherwise. Invalid sources raise an error before the encoder runs."""
    both = tiny_seq2seq("bart", max_position_embeddings=16)
    for model, source, message in (
        (both, None, "is an encoder-decoder: give what its encoder reads as source_ids"),
        (tiny(), [1, 2], "has no encoder: leave out source_ids"),
        (both, [], "source_ids needs one token id or more, each from 0 to 100"),
        (both, [VOCAB], "source_ids needs one token id or more, each from 0 to 100"),
        (both, [1] * 20, "source_ids has 20 tokens, the encoder reads 16: shorten it by 4"),
    ):
        with pytest.raises(PromptError, match=re.escape(message)) as caught:
            beam_search(model, [2], 2, 4, source_ids=source)
        assert "\n" not in str(caught.value)
