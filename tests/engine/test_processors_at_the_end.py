"""In every method, logits processors see only prefixes that plain decoding would show them.

Legend: T tokens, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import pytest
from real_tokenizers import worded
from tiny_models import VOCAB, engine_of, ragged_prompts, token_ids
from tiny_ngrams import tiny_file
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)

from outrider import Engine, Sampling
from outrider.methods import METHODS

EOS, STOP = 7, 9
TARGET = worded(0, eos_token_id=EOS)
DRAFT = worded(3, eos_token_id=EOS)
PROMPTS = [[*prompt, 5, 6, EOS, *prompt] for prompt in ragged_prompts([6, 3])]
LENGTHS = [12, 9]
GREEDY_ONLY = [name for name, method in METHODS.items() if method.recipe().greedy_only]


class Plain:
    """The allowed tokens, for ``transformers``' ``PrefixConstrainedLogitsProcessor``.

    Raises an error for a prefix that plain decoding would not have shown: one that continues after
    an end token, has the maximum length already, or contains a forbidden token.
    """

    def __init__(self, prompt: Sequence[int], length: int) -> None:
        self.prompt, self.length = list(prompt), length

    def __call__(self, batch: int, ids_T: Tensor) -> list[int]:
        ids = ids_T.tolist()
        first = len(self.prompt)
        assert ids[:first] == self.prompt
        output = ids[first:]
        assert len(output) < self.length, f"{len(output)} tokens of {self.length}"
        for at, token in enumerate(output, first):
            assert token not in (EOS, STOP), f"behind the end: {output}"
            assert token in self._allowed(ids[at - 1]), f"behind a forbidden token: {output}"
        return self._allowed(ids[-1])

    def _allowed(self, last: int) -> list[int]:
        return sorted({EOS, STOP, *range((last * 7) % 5, VOCAB, 5)})


def likely_ends(ids_1T: Tensor, scores_1V: Tensor) -> Tensor:
    """A processor that makes end tokens likely, so that sequences end inside drafts."""
    scores_1V = scores_1V.clone()
    scores_1V[:, [EOS, STOP]] += 4
    return scores_1V


def samplings(temperature: float) -> list[Sampling]:
    return [
        Sampling(
            temperature=temperature,
            seed=1,
            max_new_tokens=length,
            stop=[STOP],
            processors=[
                LogitsProcessorList([PrefixConstrainedLogitsProcessor(Plain(prompt, length), 1)]),
                likely_ends,
            ],
        )
        for prompt, length in zip(PROMPTS, LENGTHS, strict=True)
    ]


def engine(method: str, **settings: Any) -> Engine:
    options = {"bild": {"mode": "mjsd"}, "ngram": {"file": tiny_file()}}.get(method, {})
    return engine_of(TARGET, DRAFT, method, 5, options=options, **settings)


@pytest.mark.parametrize("temperature", [0.0, 0.9], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", METHODS)
def test_processors_see_only_prefixes_of_plain_decoding(method: str, temperature: float) -> None:
    """In batches of two that end at different positions.

    The method ``synthetic``, which repeats an earlier output, needs one run to record it.
    """
    if temperature and method in GREEDY_ONLY:
        pytest.skip("temperature 0 only")
    written = engine(method)
    for _ in range(2 if method == "synthetic" else 1):
        together = written.generate(PROMPTS, samplings(temperature))
        assert {r.finish_reason for r in together} <= {"eos", "stop", "length"}
        if temperature == 0 and written.verifier_at(0).lossless:
            plain = engine_of(TARGET).generate(PROMPTS, samplings(temperature))
            assert token_ids(together) == token_ids(plain)


@pytest.mark.parametrize(
    ("method", "temperature"), [("speculative", 0.0), ("top-k-tree", 0.0), ("coupled", 0.9)]
)
def test_processors_are_called_after_a_forced_token_that_they_forbid(
    method: str, temperature: float
) -> None:
    """Plain decoding emits a forced token and then calls them, whatever they said of it."""
    sampling = Sampling(
        temperature=temperature,
        max_new_tokens=12,
        ignore_eos=True,
        processors=[NoRepeatNGramLogitsProcessor(1)],
        forced={at: PROMPTS[0][at] for at in (1, 4, 5, 8)},
    )
    plain = engine_of(TARGET).generate(PROMPTS, sampling)
    drafted = engine_of(TARGET, TARGET, method, 3).generate(PROMPTS, sampling)
    assert token_ids(drafted) == token_ids(plain)
    assert drafted.stats.accepted > 0
