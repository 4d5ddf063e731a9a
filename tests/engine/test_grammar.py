"""Structured output: the distribution is the target's, restricted to the grammar, whatever drafts.

The toy model writes a, b and c; the grammar is (ab|c)*. Its end token lies beyond the vocabulary.
"""

import json
import re
from collections.abc import Sequence
from itertools import product
from typing import Any

import llguidance
import pytest
import torch
from tiny_models import engine_of, tiny, token_ids
from tiny_servers import tiny_engine, tiny_target
from torch import Tensor

from outrider import Grammar, Sampling
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.engine.grammar import GrammarProcessor
from outrider.sampling import Warp
from outrider.testing import ToyDrafter, ToyModel, enumerate_round, target_distribution
from outrider.verifiers import Block, Rejection

V, END = 3, 3
PROMPT = (2, 0)


class ToyTokens:
    """A tokenizer of four tokens, as llguidance wants it."""

    eos_token_id = END
    bos_token_id = None
    tokens = (b"a", b"b", b"c", b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return [b"abc".index(byte) for byte in text if byte in b"abc"]


def toy_processor() -> GrammarProcessor:
    wrapper = llguidance.TokenizerWrapper(ToyTokens())
    tokenizer = llguidance.LLTokenizer(wrapper, n_vocab=V + 1, eos_token=END)
    matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex("(ab|c)*"))
    return GrammarProcessor(matcher, len(PROMPT))


def allowed_after(output: Sequence[int]) -> set[int]:
    """The grammar, written down by hand."""
    return {1} if output and output[-1] == 0 else {0, 2}


def is_read(output: Sequence[int]) -> bool:
    return all(token in allowed_after(output[:n]) for n, token in enumerate(output))


class OwnGrammar:
    """The same grammar as a logits processor without any library."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        output = input_ids[0, len(PROMPT) :].tolist()
        if not is_read(output):
            return scores
        mask = torch.full_like(scores, -torch.inf)
        mask[:, sorted(allowed_after(output))] = 0
        return scores + mask


def test_masks_are_those_of_the_grammar_in_any_order() -> None:
    processor = toy_processor()
    outputs = [output for n in range(5) for output in product(range(V), repeat=n)]
    generator = torch.Generator().manual_seed(0)
    for index in torch.randint(len(outputs), (2000,), generator=generator).tolist():
        output = outputs[index]
        scores = processor(torch.tensor([[*PROMPT, *output]]), torch.zeros(1, V))
        found = {token for token in range(V) if scores[0, token] == 0}
        assert found == (allowed_after(output) if is_read(output) else set(range(V)))


@pytest.mark.parametrize(
    ("verifier", "γ"), [(Rejection(), 2), (Block(), 2), (Rejection(), 1)], ids=str
)
def test_a_round_has_exactly_the_restricted_distribution(
    verifier: Rejection | Block, γ: int
) -> None:
    """ENUM: masks on p and on q leave lossless rules lossless for the restricted distribution,
    which is computed by another implementation of the grammar."""

    def distribution(num_rows: int, processor: Any = toy_processor()) -> Warp:  # noqa: B008
        return Warp([Sampling(temperature=1.0, processors=[processor])] * num_rows, V)

    def by_hand(num_rows: int) -> Warp:
        return distribution(num_rows, OwnGrammar())

    target, draft = ToyModel.random(V, seed=1), ToyModel.random(V, seed=2)
    drafter = ToyDrafter(draft)
    done = enumerate_round(target, drafter, verifier, γ, prompt=PROMPT, distribution=distribution)
    expected_S = target_distribution(target, PROMPT, γ + 1, by_hand)
    assert done.total_variation < 1e-12
    assert float((done.completed_S - expected_S).abs().sum()) < 1e-12
    free_S = target_distribution(target, PROMPT, γ + 1)
    assert float((done.completed_S - free_S).abs().sum()) > 0.1  # the grammar does something


GRAMMARS = {
    "regex": (Grammar.regex("(yes|no){1,4}!"), lambda text: re.fullmatch("(yes|no){1,4}!", text)),
    "choice": (Grammar.choice(["red", "green", "blue"]), {"red", "green", "blue"}.__contains__),
    "grammar": (Grammar.grammar('start: "(" start ")" | "x"'), lambda text: "x" in text),
    "schema": (
        Grammar.json_schema(
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
                "required": ["ok", "n"],
                "additionalProperties": False,
            }
        ),
        lambda text: set(json.loads(text)) == {"ok", "n"},
    ),
}


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("method", ["speculative", "suffix", "top-k-tree", "coupled"])
def test_outputs_are_in_the_grammar(name: str, method: str) -> None:
    grammar, is_in = GRAMMARS[name]
    sampling = Sampling(temperature=0.7, max_new_tokens=80, grammar=grammar, seed=1)
    for result in tiny_engine(method).generate(["a", "b", "c"], sampling):
        if result.finish_reason == "eos":
            assert is_in(result.text), result.text


@pytest.mark.parametrize("name", ["regex", "choice", "schema"])
def test_greedy_outputs_are_those_of_plain_decoding(name: str) -> None:
    sampling = Sampling(temperature=0, max_new_tokens=40, grammar=GRAMMARS[name][0])
    prompts = ["def f(x):", "print", "x"]
    plain = engine_of(tiny_target()).generate(prompts, sampling)
    drafted = tiny_engine().generate(prompts, sampling)
    assert token_ids(drafted) == token_ids(plain)
    assert sum(result.stats.accepted for result in drafted) > 0


def test_rows_with_and_without_a_grammar_share_a_batch() -> None:
    samplings = [
        Sampling(max_new_tokens=20, grammar=GRAMMARS["choice"][0], seed=2),
        Sampling(max_new_tokens=20, seed=2),
        Sampling(max_new_tokens=20, grammar=GRAMMARS["regex"][0], seed=2),
    ]
    engine = tiny_engine()
    together = engine.generate(["a", "b", "c"], samplings)
    alone = [engine.generate(prompt, each) for prompt, each in zip("abc", samplings, strict=True)]
    assert token_ids(together) == token_ids(alone)
    assert together[0].text in {"red", "green", "blue"}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grammar.json_schema("{"), "json_schema: no valid JSON.*column 2"),
        (lambda: Grammar.json_schema("[1]"), "must be a JSON object"),
        (lambda: Grammar.choice([]), "non-empty strings"),
        (lambda: Grammar.choice("red"), "non-empty strings"),
        (lambda: Grammar.regex(""), "non-empty string"),
        (lambda: Sampling(grammar="x"), "must be outrider.Grammar"),
        (lambda: Sampling(grammar=Grammar.json_object(), ignore_eos=True), "leave out ignore_eos"),
    ],
)
def test_wrong_descriptions(make: Any, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        make()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        (Grammar.regex("(a"), "regex: .*unclosed group"),
        (Grammar.json_schema({"type": "nothing"}), "json_schema: "),
        (Grammar.grammar("start: nowhere"), "grammar: .*nowhere"),
    ],
)
def test_wrong_grammars_say_where(grammar: Grammar, message: str) -> None:
    with pytest.raises(InvalidParameterError, match=message):
        tiny_engine().generate("x", Sampling(grammar=grammar))


def test_models_that_cannot() -> None:
    sampling = Sampling(grammar=Grammar.json_object())
    with pytest.raises(IncompatibleError, match="fast tokenizer"):
        engine_of(tiny()).generate([[1]], sampling)
