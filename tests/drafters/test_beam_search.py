"""Beam search is that of ``transformers``, hypothesis for hypothesis, with one shared cache."""

from itertools import product

import pytest
import torch
from interpreted_graphs import untraced
from tiny_models import (
    FAMILIES,
    VOCAB,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)
from torch import Tensor
from transformers import PreTrainedModel

from outrider import Sampling
from outrider.core.errors import InvalidParameterError, NonFiniteLogitsError, PromptError
from outrider.drafters.search import beam_search as module_under_test
from outrider.drafters.search.beam_search import EarlyStopping, Hypothesis, beam_search
from outrider.drafters.search.beam_tree import BeamTree
from outrider.engine.warming import warm_up
from outrider.runtime import HFModel, KVCache
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput


def by_transformers(
    module: PreTrainedModel,
    prompt: list[int],
    num_beams: int,
    num_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    eos_ids: list[int],
    num_return: int,
) -> list[Hypothesis]:
    ids = torch.tensor([prompt])
    done = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        max_new_tokens=num_tokens,
        do_sample=False,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        eos_token_id=eos_ids or None,
        pad_token_id=0,
        num_return_sequences=num_return,
        return_dict_in_generate=True,
        output_scores=True,
    )
    hypotheses = []
    for line, score in zip(done.sequences.tolist(), done.sequences_scores.tolist(), strict=True):
        new = line[len(prompt) :]
        ends = [i for i, token in enumerate(new) if token in eos_ids]
        hypotheses.append(Hypothesis(score, tuple(new[: ends[0] + 1] if ends else new)))
    return hypotheses


def check(
    model: HFModel,
    prompt: list[int],
    num_beams: int,
    num_tokens: int,
    length_penalty: float,
    early_stopping: EarlyStopping,
    eos_ids: list[int],
) -> list[Hypothesis]:
    """Compares all B hypotheses, and their scores up to float32 rounding."""
    arguments = (num_beams, num_tokens, length_penalty, early_stopping, eos_ids, num_beams)
    mine = beam_search(model, prompt, *arguments)
    theirs = by_transformers(model.module, prompt, *arguments)
    assert [h.token_ids for h in mine] == [h.token_ids for h in theirs]
    assert [h.score for h in mine] == pytest.approx([h.score for h in theirs], rel=1e-6, abs=1e-4)
    return mine


def frequent(model: HFModel, prompt: list[int], num: int) -> list[int]:
    """Tokens that are frequent among the beams; as end-of-sequence tokens they end many early."""
    found = beam_search(model, prompt, 6, 12, num_return_sequences=6)
    tokens = [token for hypothesis in found for token in hypothesis.token_ids[1:]]
    return sorted(set(tokens), key=lambda token: (-tokens.count(token), token))[:num]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_an_end(family: str) -> None:
    model = tiny(family, 5, std=0.2)
    for length, num_beams in ((7, 4), (1, 3), (20, 2)):
        (prompt,) = ragged_prompts([length], seed=length)
        found = check(model, prompt, num_beams, 12, 1.0, False, [])
        assert all(len(h.token_ids) == 12 for h in found)


ENDS: list[tuple[str, float, EarlyStopping]] = [
    *(("llama", *each) for each in product((1.0, 0.0, -0.8, 2.5), (False, True, "never"))),
    *(("gpt2", *each) for each in ((1.0, True), (0.0, "never"), (-0.8, False), (2.5, True))),
    *(("gemma2", *each) for each in ((1.0, "never"), (0.0, False), (-0.8, True), (2.5, "never"))),
]
"""Every length penalty with every way to stop; neither depends on what the model computes."""


@pytest.mark.parametrize(("family", "length_penalty", "early_stopping"), ENDS)
def test_with_ends(family: str, length_penalty: float, early_stopping: EarlyStopping) -> None:
    """One and two end-of-sequence tokens, several prompts; most outputs end early."""
    model, lengths = tiny(family, 5, dtype=torch.float64, std=0.15), set()
    for seed in range(3):
        (prompt,) = ragged_prompts([5], seed=seed)
        for num_eos in (1, 2):
            eos_ids = frequent(model, prompt, num_eos)
            found = check(model, prompt, 4, 14, length_penalty, early_stopping, eos_ids)
            lengths |= {len(h.token_ids) for h in found}
    assert len(lengths) > 3 or length_penalty > 2  # that favours the longest


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_bias_and_penalties_apply_to_log_probabilities(family: str) -> None:
    """As in transformers, without renormalising; each beam by its own path."""
    model, ids = tiny(family, 5, dtype=torch.float64, std=0.15), ragged_prompts([5, 9])
    for prompt in ids:
        bias, penalty = {prompt[0]: 1.5, 3: -0.5, 7: 2.0}, 1.3
        sampling = Sampling(logit_bias=bias, repetition_penalty=penalty)
        mine = beam_search(model, prompt, 4, 12, num_return_sequences=4, sampling=sampling)
        text = torch.tensor([prompt])
        done = model.module.generate(
            text,
            attention_mask=torch.ones_like(text),
            num_beams=4,
            max_new_tokens=12,
            do_sample=False,
            repetition_penalty=penalty,
            sequence_bias={(token,): number for token, number in bias.items()},
            pad_token_id=0,
            num_return_sequences=4,
            return_dict_in_generate=True,
            output_scores=True,
        )
        theirs = [tuple(line[len(prompt) :]) for line in done.sequences.tolist()]
        assert [h.token_ids for h in mine] == theirs
        scores = done.sequences_scores.tolist()
        assert [h.score for h in mine] == pytest.approx(scores, rel=1e-5, abs=1e-4)
        plain = beam_search(model, prompt, 4, 12)
        assert plain[0].token_ids != mine[0].token_ids


class Programs(CompiledExecutor):
    """The executor of programs that are not traced; counts the forward passes that it runs."""

    forwards = 0

    def __init__(self, model: HFModel) -> None:
        super().__init__(model.module, model.spec, "model", lambda each, trace: untraced(each))

    def forward(self, batch: ForwardBatch) -> ForwardOutput | None:
        found = super().forward(batch)
        self.forwards += found is not None
        return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_by_programs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every forward pass of a search, whose tree is packed often, and whose beams end early."""
    monkeypatch.setattr(module_under_test, "_PACK_FROM", 8)
    model, lengths = tiny(family, 5, dtype=torch.float64, std=0.15), set()
    for prompt in ragged_prompts([1, 5, 9]):
        model.compiled = None
        eos_ids = frequent(model, prompt, 1)
        model.compiled = executor = Programs(model)
        found = check(model, prompt, 4, 14, 1.0, False, eos_ids)
        lengths |= {len(h.token_ids) for h in found}
        most = max(len(h.token_ids) for h in found)
        assert executor.forwards >= most - (len(prompt) == 1)  # which leaves no KV buffer to read
        assert executor.refused == []
    assert len(lengths) > 2


def test_an_engine_compiles_the_passes_ahead() -> None:
    """Those over trees, too: a sealed executor runs no others."""
    model = tiny("llama", 5)
    wanted = engine_of(model, None, "beam-search", options={"num_beams": 3})
    prompts = ragged_prompts([5, 9])
    outputs = token_ids(wanted.generate(prompts, greedy(12)))
    model.compiled = executor = Programs(model)
    engine = engine_of(model, None, "beam-search", options={"num_beams": 3})
    warm_up(engine)
    assert executor.sealed
    executor.forwards = 0
    assert token_ids(engine.generate(prompts, greedy(12))) == outputs
    assert executor.forwards > 2 * 12


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_many_random_models(family: str) -> None:
    """Eight random models of each family, beams and penalties that vary."""
    for seed in range(8):
        model = tiny(family, 10 + seed, std=0.12 + 0.02 * seed)
        (prompt,) = ragged_prompts([1 + 3 * seed], seed=seed)
        eos_ids = frequent(model, prompt, seed % 3)
        early_stopping: EarlyStopping = (False, True, "never")[seed % 3]
        check(model, prompt, 2 + seed, 16, (1.0, 0.0, 2.0, -1.0)[seed % 4], early_stopping, eos_ids)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "gemma3"])
def test_packing_the_tree_changes_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed at almost every step, and as rarely as by default; sliding windows of 8 tokens."""
    packed = 0
    pack = KVCache.pack

    def counted(self: KVCache, nodes_BD: Tensor, first: int = 0) -> None:
        nonlocal packed
        packed += 1
        pack(self, nodes_BD, first)

    monkeypatch.setattr(KVCache, "pack", counted)
    model = tiny(family, 5, std=0.15)
    (prompt,) = ragged_prompts([9])
    seldom = check(model, prompt, 5, 60, 1.0, False, [])
    assert 1 <= packed <= 8
    monkeypatch.setattr(module_under_test, "_PACK_FROM", 8)
    packed = 0
    often = check(model, prompt, 5, 60, 1.0, False, [])
    assert [h.token_ids for h in often] == [h.token_ids for h in seldom]
    assert packed > 8


def test_a_wrongly_packed_tree_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: node numbers are packed, cache slots are not."""
    monkeypatch.setattr(KVCache, "pack", lambda self, nodes_BD, first=0: None)
    (prompt,) = ragged_prompts([9])
    with pytest.raises(AssertionError):
        check(tiny("llama", 5, std=0.15), prompt, 5, 60, 1.0, False, [])


def test_paths_that_are_not_reordered_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: paths are not reordered with the beams."""

    def grown(self: BeamTree, beam_Bn: Tensor, token_Bn: Tensor) -> BeamTree:
        width = max(self.path_BnK.shape[1], 1)
        return right(self, torch.arange(beam_Bn.shape[1])[None] % width, token_Bn)

    right = BeamTree.grown
    monkeypatch.setattr(BeamTree, "grown", grown)
    (prompt,) = ragged_prompts([9])
    with pytest.raises(AssertionError):
        check(tiny("llama", 5, std=0.15), prompt, 5, 20, 1.0, False, [])


def test_fewer_slots_than_caches_of_their_own() -> None:
    """100 prompt tokens, 8 beams, 20 new tokens: the cache holds one prompt, not eight, and at most
    all nodes of the search."""
    model = tiny("llama", 5)
    (prompt,) = ragged_prompts([100])
    caches: list[KVCache] = []
    start = model.start

    def noted(context: object) -> KVCache:
        caches.append(start(context))  # type: ignore[arg-type]
        return caches[-1]

    model.start = noted  # type: ignore[method-assign]
    beam_search(model, prompt, 8, 20)
    slots = caches[0].keys[0].shape[2]  # type: ignore[union-attr]
    assert slots <= 256 < 8 * 120


def test_the_contexts_end() -> None:
    model = tiny("llama", 5)
    (prompt,) = ragged_prompts([model.limit - 6])
    found = check(model, prompt, 4, 6, 1.0, False, [])
    assert all(len(h.token_ids) == 6 for h in found)
    with pytest.raises(InvalidParameterError, match=r"max_new_tokens=7: must be .* 1 to 6"):
        beam_search(model, prompt, 4, 7)


def test_bad_arguments_are_named() -> None:
    model = tiny()
    for arguments, message in (
        ((0, 5), "num_beams=0"),
        ((2.0, 5), "num_beams=2.0"),
        ((2, 0), "max_new_tokens=0"),
        ((2, 5, 1.0, "always"), "early_stopping='always'"),
        ((2, 5, float("inf")), "length_penalty=inf"),
        ((2, 5, 1.0, False, (), 3), "num_return_sequences=3: must be a whole number from 1 to 2"),
    ):
        with pytest.raises(InvalidParameterError, match=message):
            beam_search(model, [1, 2], *arguments)  # type: ignore[arg-type]
    for prompt in ([], [VOCAB], [-1]):
        with pytest.raises(PromptError, match="prompt"):
            beam_search(model, prompt, 2, 5)


def test_damaged_weights_are_named() -> None:
    module = tiny_module()
    with torch.no_grad():
        module.lm_head.weight[3] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match="NaN"):
        beam_search(HFModel(module), [1, 2], 2, 5)
