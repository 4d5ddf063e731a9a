"""String-level exact match: candidates from text, the output in the draft's tokens, and the
distribution of rounds."""

from itertools import product

import pytest
import torch
from real_tokenizers import KINDS, TEXTS, model, words
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny_module, token_ids

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Prefix
from outrider.core.errors import InvalidParameterError, VocabularyMismatchError
from outrider.drafters.vocabulary.follow import NUM_REREAD, DraftRow
from outrider.drafters.vocabulary.slem import SlemDrafter
from outrider.methods.vocabularies import VOCABULARIES
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import check_drafter, enumerate_round
from outrider.verifiers import Greedy, Rejection, SampleMatch

SLEM = VOCABULARIES[1]
LOSSLESS = ("byte", "byte-small", "fallback")  # their tokens can say any text
PROMPTS = ["The quick brown", "x", "    return déjà vu, 東京"]
SAMPLING = Sampling(
    temperature=0.7, top_k=30, frequency_penalty=0.3, max_new_tokens=14, ignore_eos=True
)


def toy(seed: int, *names: str, std: float = 0.25) -> HFModel:
    module = tiny_module(
        "llama", seed, torch.float64, std, vocab_size=len(names), num_hidden_layers=1
    )
    return HFModel(module, words(names))


def row_of(drafter: SlemDrafter, text: str) -> DraftRow:
    """A row that has this text."""
    prompt = tokenizer_ids(drafter, text)
    tokens = drafter.bridge.translate(prompt)
    return DraftRow(tokens, len(prompt), prompt[-NUM_REREAD:], len(tokens) - 1)


def tokenizer_ids(drafter: SlemDrafter, text: str) -> list[int]:
    return drafter.bridge.target.decoder_prompt + drafter.bridge.target.encode(text)


def test_contract() -> None:
    with torch.inference_mode():
        target = toy(0, "a", "b", "c", "<unk>", "e", "f")
        draft = toy(1, "f", "<unk>", "d", "a", "e", "b", "g")
        check_drafter(SlemDrafter(target, draft), 6)
        check_drafter(SlemDrafter(target, draft, 0.3), 6)


@pytest.mark.parametrize("verifier", [SampleMatch(), Rejection()], ids=lambda v: type(v).__name__)
def test_a_round_has_exactly_the_targets_distribution(verifier: SampleMatch | Rejection) -> None:
    """ENUM with part of the vocabulary in common."""
    target, draft = toy(0, "a", "b", "<unk>"), toy(2, "b", "<unk>", "d")

    def distribution(num_rows: int) -> Distribution:
        return Warp([Sampling(temperature=0.8, frequency_penalty=0.3)] * num_rows, 3)

    with torch.inference_mode():
        drafter = SlemDrafter(target, draft)
        done = enumerate_round(
            target, drafter, verifier, 2, prompt=(0, 1), distribution=distribution
        )
    assert done.total_variation < 1e-9
    assert done.acceptance_length > 1.05


@pytest.mark.parametrize(("target", "draft"), list(product(KINDS, KINDS)))
def test_greedy_output_is_that_of_plain_decoding(target: str, draft: str) -> None:
    """Although random models emit what no tokenizer would, and logits are padded."""
    models = model(target, 0, extra=3), model(draft, 1, extra=9)
    results = engine_of(*models, SLEM).generate(PROMPTS, greedy(9))
    assert token_ids(results) == token_ids(engine_of(models[0]).generate(PROMPTS, greedy(9)))


@pytest.mark.parametrize(("target", "draft"), [("byte", "unigram"), ("wordpiece", "fallback")])
def test_rows_of_a_batch_are_rows_alone(target: str, draft: str) -> None:
    """Also rows with little room left to draft."""
    sampling = [SAMPLING, greedy(5), SAMPLING]
    models = model(target), model(draft, 1)
    both, alone = (engine_of(*models, SLEM, max_batch_size=size) for size in (3, 1))
    results, expected = (engine.generate(PROMPTS, sampling) for engine in (both, alone))
    assert token_ids(results) == token_ids(expected)
    assert [r.stats.drafted for r in results] == [r.stats.drafted for r in expected]


def test_a_perfect_draft_is_accepted() -> None:
    """The target drafts for itself, in tokens that its tokenizer would choose: all are accepted."""
    names = [f"w{i}" for i in range(30)] + ["<unk>"]
    target, draft = toy(0, *names), toy(0, *names)
    results = engine_of(target, draft, SLEM).generate(ragged_prompts([6, 1, 9], 30), greedy(20))
    assert results.stats.acceptance_rate == 1
    assert results.stats.acceptance_length > 2


@pytest.mark.parametrize(("target", "draft"), list(product(KINDS, KINDS)))
def test_candidates_are_the_targets_tokens_of_the_text(target: str, draft: str) -> None:
    """The draft continues the text in its tokens; the candidates are the target's tokens of the
    continuation, behind what is committed."""
    drafter = SlemDrafter(model(target), model(draft))
    known = drafter.bridge.target
    row = row_of(drafter, "The quick brown")
    whole = drafter.bridge.draft.encode("The quick brown fox jumps")
    behind = drafter.bridge.draft.encode_after("The quick brown", " fox jumps")
    row.drafted = behind if behind is not None else whole[-3:]
    found = drafter._candidates(row)
    if "wordpiece" not in (target, draft):
        assert known.bytes_of(found) == b" fox jumps"
        assert found == known.encode("The quick brown fox jumps")[-len(found) :]
    else:
        assert "foxjumps".endswith(known.bytes_of(found).decode().replace(" ", ""))
        assert found


def test_candidates_continue_a_word() -> None:
    """The rest of a word is not tokenised like a word: committed tokens are tokenised with it."""
    drafter = SlemDrafter(model("wordpiece"), model("byte"))
    known = drafter.bridge.target
    split = (known.encode(word) for word in ("foxs", "dogs", "backs", "thee", "jumpse"))
    tokens = next(t for t in split if len(t) > 1 and not any(map(known.is_special, t)))
    rest = known.bytes_of(tokens[1:]).decode()
    row = row_of(drafter, "the " + known.bytes_of(tokens[:1]).decode().strip())
    row.drafted = drafter.bridge.draft.encode(rest)
    assert drafter._candidates(row) == tokens[1:]
    row.tail = []
    assert drafter._candidates(row) != tokens[1:]


def test_candidates_end_where_the_output_ends() -> None:
    """At the draft's end-of-text token, which becomes the target's; not at other special tokens,
    nor inside a character."""
    drafter = SlemDrafter(model("byte"), model("fallback"))
    target, draft = drafter.bridge.target, drafter.bridge.draft
    row = row_of(drafter, "The")
    row.drafted = [draft.forms["x"], draft.forms["</s>"], draft.forms["x"]]
    assert drafter._candidates(row) == [target.forms["x"], target.forms["<|endoftext|>"]]
    row.drafted = [draft.forms["x"], draft.forms["<s>"], draft.forms["x"]]
    assert drafter._candidates(row) == [target.forms["x"]]
    row.drafted = [draft.forms["x"], draft.forms["<0xE6>"]]
    assert drafter._candidates(row) == [target.forms["x"]]
    row.pending = b"\xe6"
    assert drafter._candidates(row) == []


@pytest.mark.parametrize("text", [*TEXTS, "xquick  brown\n\n東", "doe"])
@pytest.mark.parametrize(("target", "draft"), list(product(LOSSLESS, LOSSLESS)))
def test_the_draft_reads_the_committed_text(target: str, draft: str, text: str) -> None:
    """Appended a few tokens at a time, the text is complete in the end, in the tokens that the
    draft's tokenizer chooses unless a choice depends on tokens further back."""
    drafter = SlemDrafter(model(target), model(draft))
    known = drafter.bridge.draft
    row = row_of(drafter, "The")
    said = drafter.bridge.target.encode_after("The", text)
    said = said if said is not None else drafter.bridge.target.spell(text)
    for first in range(0, len(said), 3):
        drafter._append(row, said[first : first + 3], [])
    assert row.pending == b""
    assert known.bytes_of(row.tokens).decode().lstrip(" ") == "The" + text
    assert len(row.tokens) <= 1.2 * len(known.encode("The" + text)) + 2


def test_drafted_tokens_are_kept_while_they_agree_with_the_text() -> None:
    drafter = SlemDrafter(model("byte"), model("byte-small"))
    target, draft = drafter.bridge.target, drafter.bridge.draft
    row = row_of(drafter, "The")
    before = list(row.tokens)
    odd = [draft.ids[letter.encode()] for letter in " fox"]  # no tokenizer would choose these
    drafter._append(row, target.encode_after("The", " fox") or [], odd)
    assert row.tokens == before + odd
    row = row_of(drafter, "The")
    drafter._append(row, target.encode_after("The", " fo\n") or [], odd)
    assert draft.bytes_of(row.tokens) == b"The fo\n"


def test_special_tokens_are_converted_by_name() -> None:
    drafter = SlemDrafter(model("byte"), model("fallback"))
    target, draft = drafter.bridge.target, drafter.bridge.draft
    row = row_of(drafter, "The")
    start, x = target.forms["<|im_start|>"], target.forms["x"]
    drafter._append(row, [x, start, x, target.ids[b"\xe6"], start], [])
    ours = [draft.forms[form] for form in ("x", "<|im_start|>", "x", "<|im_start|>")]
    assert row.tokens[-4:] == ours
    assert row.pending == b""


@pytest.mark.parametrize(("target", "draft"), [("byte", "unigram"), ("fallback", "byte-small")])
def test_the_cache_holds_the_text(target: str, draft: str) -> None:
    """After any number of rounds the first drafted token is the argmax of a full pass over the
    draft's tokens, some of which were tokenised again."""
    verification, drafter = model(target), SlemDrafter(model(target), model(draft, 1))
    prompts = [verification.tokenizer(text)["input_ids"] for text in PROMPTS]  # type: ignore[misc]
    distribution = Warp([Sampling()] * 3, verification.num_tokens)
    context = Context.start(prompts, distribution, [0] * 3, range(3))
    rolled_back = 0
    with torch.inference_mode():
        cache, state = verification.start(context), drafter.start(context)
        for γ in (3, 0, 1, 5, 0, 4, 2):
            before = [list(row.tokens) for row in state.rows]
            drawn = drafter.propose(state, context, Budget(γ), context.rng)
            for row, old in zip(state.rows, before, strict=True):
                rolled_back += row.tokens[: len(old)] != old
                logits_U = full_logits(drafter.model.module, row.tokens)[-1]
                best = int(logits_U.masked_fill(drafter._unusable_U, -torch.inf).argmax())
                assert not γ or row.drafted[0] == best
            scores = verification.score(cache, drawn)
            p_BNV = context.distribution(scores.logits_BNV, Prefix.of_draft(context, drawn))
            verdict = Greedy()(drawn, p_BNV, context.rng).read()
            verification.commit(cache, drawn, verdict)
            drafter.commit(state, drawn, verdict, scores)
            context.append(verdict.emitted(drawn), verdict.num_emitted)


def test_a_draft_that_runs_out_of_context() -> None:
    """The row goes on without drafts."""
    target, draft = model("byte"), model("unigram", 1, max_position_embeddings=36)
    prompts = ["The quick brown fox jumps over the", "x"]
    results = engine_of(target, draft, SLEM).generate(prompts, greedy(20))
    assert token_ids(results) == token_ids(engine_of(target).generate(prompts, greedy(20)))


def test_errors_at_construction() -> None:
    models = model("byte"), model("unigram")
    with pytest.raises(InvalidParameterError, match="draft_confidence="):
        SlemDrafter(*models, confidence=-1.0)
    with pytest.raises(VocabularyMismatchError, match="the target has no tokenizer"):
        SlemDrafter(HFModel(tiny_module()), models[1])
    apart = toy(0, "a", "<unk>"), toy(1, "b", "<unk>")
    plain = engine_of(apart[0]).generate([[0]], greedy(5))
    assert token_ids(engine_of(*apart, SLEM).generate([[0]], greedy(5))) == token_ids(plain)
