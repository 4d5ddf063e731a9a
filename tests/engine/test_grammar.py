"""Structured output: the distribution is the target's, restricted to the grammar, whatever drafts.

The toy model writes a, b and c; the grammar is (ab|c)*. Its end token lies beyond the vocabulary.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import llguidance
import pytest
import torch
from tiny_models import engine_of, tiny, token_ids
from tiny_servers import tiny_engine, tiny_target
from torch import Tensor

from outrider import Grammar, Sampling, Speculation
from outrider.core import Budget, Context, Draft, Stream
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.engine.forced import ForcedTokens
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.grammar import GrammarProcessor
from outrider.methods import METHODS
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


class LyingProcessor(GrammarProcessor):
    """Says that c is forced wherever it is allowed."""

    def forced(self, sequence_T: Tensor) -> list[int]:
        output = sequence_T[len(PROMPT) :].tolist()
        return [2] if 2 in allowed_after(output) else [1]


class KeepsDraftProbabilities(ForcedTokens):
    """A mutant: forced tokens replace drawn ones, whose q stays."""

    def propose(self, state: Any, context: Context, budget: Budget, rng: Stream) -> Draft:
        drafted = self.drafter.propose(state, context, budget, rng)
        own = super().propose(state, context, budget, rng)
        num = own.num_nodes
        assert drafted.probs_BNV is not None
        return Draft.chain(own.tokens_BN, None, drafted.probs_BNV[:, :num], "iid")


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


def enumerated(
    wrap: type[ForcedTokens],
    make: type[GrammarProcessor],
    output: tuple[int, ...],
    verifier: Any,
    γ: int,
) -> tuple[float, float]:
    """ENUM of a round after an output: how far its distribution is from the restricted target,
    which another implementation of the grammar computes; and the mean of emitted tokens."""
    processor = toy_processor()
    processor.__class__ = make

    def distribution(num_rows: int) -> Warp:
        return Warp([Sampling(temperature=1.0, processors=[processor])] * num_rows, V)

    def by_hand(num_rows: int) -> Warp:
        return Warp([Sampling(temperature=1.0, processors=[OwnGrammar()])] * num_rows, V)

    prompt = (*PROMPT, *output)
    target, draft = ToyModel.random(V, seed=1), ToyModel.random(V, seed=2)
    drafter = wrap(ToyDrafter(draft), V, torch.float64)
    done = enumerate_round(target, drafter, verifier, γ, prompt=prompt, distribution=distribution)
    expected_S = target_distribution(target, prompt, γ + 1, by_hand)
    return float((done.completed_S - expected_S).abs().sum()), done.acceptance_length


@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=str)
@pytest.mark.parametrize("γ", [1, 2, 3])
def test_forced_tokens_leave_the_distribution_as_it_is(verifier: Any, γ: int) -> None:
    """After a, only b may follow. With γ = 1 and 2 the round drafts b alone; with γ = 3 the draft
    model drafts, and draws b itself."""
    distance, length = enumerated(ForcedTokens, GrammarProcessor, (0,), verifier, γ)
    assert distance < 1e-12
    assert length == pytest.approx(2) if γ < 3 else length > 2


def test_a_token_that_is_not_forced_is_verified_like_any_other() -> None:
    """Even of a grammar that errs, since q says truthfully that the token was certain; a mutant
    that leaves the draft model's q is rejected."""
    distance, length = enumerated(ForcedTokens, LyingProcessor, (), Rejection(), 1)
    assert distance < 1e-12
    assert 1 < length < 2
    distance, _ = enumerated(KeepsDraftProbabilities, LyingProcessor, (), Rejection(), 1)
    assert distance > 0.01


FIXED = Grammar.regex("The answer is (yes|no), and no more[.]")


GREEDY = Sampling(temperature=0, max_new_tokens=80, grammar=FIXED)
FIRST = ["def f(x):", "print"]


@cache
def plain_outputs() -> list[tuple[int, ...]]:
    return token_ids(engine_of(tiny_target()).generate(FIRST, GREEDY))


@pytest.mark.parametrize("method", sorted(set(METHODS) - {"ngram"}))  # its file has other tokens
def test_forced_tokens_with_every_method(method: str) -> None:
    """Greedy outputs of lossless methods are those of plain decoding; most tokens are forced."""
    row = METHODS[method]
    options = {"mode": "mjsd"} if method == "bild" else {}
    results = tiny_engine(method, options=options).generate(FIRST, GREEDY)
    if row.lossless:
        assert token_ids(results) == plain_outputs()
    forced = [result.origins.count("forced") for result in results]
    assert forced == [result.stats.forced for result in results]
    for result in results:
        assert re.fullmatch(FIXED.source, result.text)


def test_forced_chains_are_longer_than_walks_down_the_trees_of_other_rows() -> None:
    """Each node knows its ancestors in both rows."""
    each = Grammar.choice(["abcdefghijklmnopqrstuvwxyz"])
    samplings = [Sampling(temperature=0, max_new_tokens=30, grammar=g) for g in (each, None)]
    prompts = ["x", "def f(x):"]
    results = tiny_engine("top-k-tree", γ=16, options={"topology": "2"}).generate(
        prompts, samplings
    )
    assert results[0].stats.forced > 16
    assert token_ids(results) == token_ids(engine_of(tiny_target()).generate(prompts, samplings))


def test_forced_tokens_need_no_draft_model() -> None:
    """The draft model runs in rounds with a choice alone."""
    engine = tiny_engine()
    fixed = Sampling(max_new_tokens=80, grammar=Grammar.choice(["abcdefghijklmnopqrstuvwxyz"]))
    result = engine.generate("x", fixed)
    assert result.text == "abcdefghijklmnopqrstuvwxyz"
    assert result.stats.forced == result.stats.accepted == result.stats.drafted
    assert result.stats.rounds <= 1 + len(result.token_ids) // 5
    read = []
    draft = engine.draft
    assert draft is not None
    extend = draft.extend
    draft.extend = lambda *given: read.append(1) or extend(*given)  # type: ignore[method-assign]
    engine.generate("x", fixed)
    assert read == []


def test_forced_tokens_are_drafted_whatever_a_governor_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They cost no draft model. Nor do they tell how good it is."""
    ask = BatchGovernor.ask
    fixed = Sampling(max_new_tokens=80, grammar=Grammar.choice(["abcdefghijklmnopqrstuvwxyz"]))
    engine = tiny_engine(γ="auto")
    assert engine.governor is not None
    before = engine.governor.beliefs(1)["acceptance, draft"]

    def nothing(
        self: BatchGovernor, rows: Any, limits: Sequence[int], greedy: bool, reviewable: int
    ) -> Asked:
        asked = ask(self, rows, limits, greedy, reviewable)
        return replace(asked, length=0, lengths=[0] * len(limits))

    for _ in range(2):
        result = engine.generate("x", fixed)
        assert result.stats.forced == result.stats.accepted == result.stats.drafted
        assert result.stats.rounds <= 1 + len(result.token_ids) // 5
        monkeypatch.setattr(BatchGovernor, "ask", nothing)
    assert engine.governor.beliefs(1)["acceptance, draft"] == before


MIXED = (
    "speculative block suffix staged specinfer sequoia spectr traversal top-k-tree dynamic-tree "
    "coupled hybrid slem"
)


def test_a_rule_of_one_row_leaves_the_forced_tokens_of_others() -> None:
    """A lossy rule takes no forced tokens; a lossless one in the same batch does."""
    engine = tiny_engine()
    sampling = Sampling(temperature=1.0, max_new_tokens=60, seed=5, grammar=FIXED)
    rows = [
        (sampling, None),
        (sampling, Speculation(method="mentored", divergence_budget=0.3)),
        (sampling, Speculation(method="block")),
        (replace(sampling, grammar=None), Speculation(method="mentored", divergence_budget=0.3)),
    ]
    prompts = ["a", "bc", "def", "g"]
    together = engine.generate(
        prompts, [each for each, _ in rows], speculation=[own for _, own in rows]
    )
    for prompt, (each, own), result in zip(prompts, rows, together, strict=True):
        alone = engine.generate(prompt, each, speculation=own)
        assert (alone.token_ids, alone.origins) == (result.token_ids, result.origins)
    assert [each.stats.forced > 0 for each in together] == [True, False, True, False]


@pytest.mark.parametrize("method", MIXED.split())
def test_a_draft_model_catches_up_after_forced_tokens(method: str) -> None:
    """Sampled outputs are those of the same row alone, whatever other rows force meanwhile."""
    grammar = Grammar.regex("[a-f]{6}-------------------[a-f]{9}======[a-f]{3}")
    samplings = [
        Sampling(max_new_tokens=60, grammar=grammar, seed=seed, temperature=1.5)
        for seed in range(3)
    ]
    engine = tiny_engine(method)
    alone = [engine.generate(f"x{n}", each) for n, each in enumerate(samplings)]
    other = Sampling(max_new_tokens=60, seed=1)
    together = engine.generate([f"x{n}" for n in range(3)] + ["y"], [*samplings, other])
    assert token_ids(together[:3]) == token_ids(alone)
    assert all(each.stats.forced > 8 for each in alone)


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
        (Grammar.json_schema({"type": "nothing"}), "^json_schema: Invalid type: nothing"),
        (
            Grammar.json_schema({"properties": {"a/b": {"items": {"anyOf": [{}, {"type": "c"}]}}}}),
            "^json_schema: at /properties/a~1b/items/anyOf/1: Invalid type: c",
        ),
        (
            Grammar.json_schema({"$defs": {"x": {}}, "properties": {"y": {"$ref": "#/$defs/z"}}}),
            "^json_schema: at /properties/y: ",
        ),
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
