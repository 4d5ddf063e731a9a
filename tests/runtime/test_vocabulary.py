"""What tokens say, and how text goes from one vocabulary to another. Tokenizers are real."""

from itertools import product

import pytest
import torch
from real_tokenizers import KINDS, TEXTS, model, tokenizer, words
from tiny_models import tiny, tiny_module

from outrider.core.errors import VocabularyMismatchError
from outrider.runtime import HFModel
from outrider.runtime.hf.vocabulary import Vocabulary, complete
from outrider.runtime.hf.vocabulary_bridge import Bridge, Shared

LOSSLESS = ("byte", "byte-small", "fallback")  # their tokens can say any text
PAIRS = list(product(KINDS, KINDS))


def vocabulary(kind: str, extra: int = 0) -> Vocabulary:
    return Vocabulary(tokenizer(kind), len(tokenizer(kind)) + extra)


def bridge(target: str, draft: str) -> Bridge:
    return Bridge(model(target), model(draft))


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_the_text(kind: str) -> None:
    """Within a text, that is: behind a word of it."""
    known = vocabulary(kind)
    for text in TEXTS:
        tokens = known.encode(text)
        said = known.bytes_of(tokens).decode()
        if kind in LOSSLESS:
            assert said.removeprefix(" ") == text.removeprefix(" ")
        assert said.removeprefix(" ").split() == known.decode(tokens).split()


def test_spaces_bytes_and_the_rest_of_words() -> None:
    byte, unigram, wordpiece = (vocabulary(kind) for kind in ("byte", "unigram", "wordpiece"))
    fallback = vocabulary("fallback")
    assert byte.pieces[byte.forms["Ġ"]] == unigram.pieces[unigram.forms["▁"]] == b" "
    assert byte.pieces[byte.forms["Ċ"]] == fallback.pieces[fallback.forms["<0x0A>"]] == b"\n"
    assert byte.pieces[byte.forms["é"]] == b"\xe9", "a letter of the alphabet of bytes"
    assert unigram.pieces[unigram.forms["é"]] == "é".encode()
    assert wordpiece.pieces[wordpiece.forms["the"]] == b" the"
    assert wordpiece.pieces[wordpiece.forms["##e"]] == b"e"
    assert fallback.pieces[fallback.forms["<0xE6>"]] == b"\xe6"
    assert fallback.ids[b"r"] == fallback.forms["r"], "not its byte"


def test_special_tokens_say_nothing_and_open_texts() -> None:
    unigram, wordpiece = vocabulary("unigram"), vocabulary("wordpiece")
    for token in unigram.forms["<s>"], unigram.forms["<unk>"]:
        assert unigram.is_special(token)
        assert unigram.pieces[token] == b""
    assert unigram.decoder_prompt == [unigram.forms["<s>"]] == [unigram.beginning]
    assert wordpiece.decoder_prompt == [wordpiece.forms["[CLS]"]], "and no [SEP] behind"
    assert vocabulary("byte").decoder_prompt == []


def test_padding_says_nothing() -> None:
    known = vocabulary("byte", extra=7)
    assert known.pieces[-7:] == [b""] * 7
    assert len(known.pieces) == known.num_tokens == len(tokenizer("byte")) + 7
    narrow = Vocabulary(tokenizer("byte"), 300)
    assert max(narrow.ids.values()) < 300
    assert max(narrow.encode(TEXTS[1])) < 300


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_have_equal_content(target: str, draft: str) -> None:
    both = bridge(target, draft)
    ours, theirs = both.target, both.draft
    assert len(set(both.draft_ids.values())) == len(both.draft_ids), "one to one"
    for token, other in both.draft_ids.items():
        assert ours.pieces[token] == theirs.pieces[other]
        assert ours.is_special(token) == theirs.is_special(other)
    said = {piece for piece in ours.pieces if piece} & {piece for piece in theirs.pieces if piece}
    assert {ours.pieces[token] for token in both.draft_ids} - {b""} == said
    if target == draft:
        assert both.draft_ids == {token: token for token in range(len(tokenizer(target)))}
    ends = [tokenizer(kind).eos_token_id for kind in (target, draft)]
    if None not in ends:
        assert both.draft_ids[ends[0]] == ends[1], "whatever it is called"


@pytest.mark.parametrize(("target", "draft"), [p for p in PAIRS if "wordpiece" not in p])
def test_transformers_finds_no_token_that_is_missed(target: str, draft: str) -> None:
    """``AssistantToTargetTranslator`` compares how tokens are written. It takes a byte of a
    byte-level vocabulary for a letter; all other pairs are found here too."""
    from transformers.generation.candidate_generator import AssistantToTargetTranslator

    ours, theirs = tokenizer(target), tokenizer(draft)
    found = AssistantToTargetTranslator(ours, theirs, len(ours)).target_to_assistant_input_ids
    both = bridge(target, draft)
    for token, other in found.items():
        if both.draft_ids.get(token) != other:
            form = ours.convert_ids_to_tokens(token)
            assert len(form) == 1
            assert not form.isascii()
            assert "unigram" in (target, draft)
    assert len(both.draft_ids) >= len(found) - 8


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("text", [*TEXTS, "brown fox, \n", " x", "a"])
def test_a_prompt_is_translated_as_the_draft_would_tokenise_it(
    target: str, draft: str, text: str
) -> None:
    both = bridge(target, draft)
    found = both.translate(tokenizer(target)(text)["input_ids"])
    if target in LOSSLESS:
        decoder_prompt = both.draft.decoder_prompt
        assert (
            found == decoder_prompt + tokenizer(draft)(text, add_special_tokens=False)["input_ids"]
        )
    assert found
    if target in LOSSLESS and draft in LOSSLESS:
        assert both.draft.decode(found[len(both.draft.decoder_prompt) :]).lstrip(
            " "
        ) == text.lstrip(" ")


def test_special_tokens_of_a_prompt() -> None:
    """Kept where the draft has them, else left out; never spelled."""
    both = bridge("byte", "fallback")
    prompt = tokenizer("byte")("<|im_start|>the dog")["input_ids"]
    found = both.translate(prompt)
    assert found[:2] == [*both.draft.decoder_prompt, both.draft.forms["<|im_start|>"]]
    assert b"im_start" not in both.draft.bytes_of(found)
    to_unigram = bridge("byte", "unigram")
    assert "im" not in to_unigram.draft.decode(to_unigram.translate(prompt))
    alone = bridge("byte-small", "unigram").translate(prompt[:1])
    assert alone == to_unigram.draft.decoder_prompt


def test_a_text_of_tokens_that_the_tokenizer_would_not_choose() -> None:
    """Token by token then, so that equal vocabularies give equal tokens."""
    for kind in KINDS:
        both = bridge(kind, kind)
        odd = list(range(len(tokenizer(kind))))
        assert both.translate(odd) == odd


def test_characters_that_come_in_pieces() -> None:
    """The draft gets a character that it cannot spell in bytes once it is complete."""
    both = bridge("byte", "unigram")
    euro = "東".encode()
    tokens = [both.target.ids[bytes([byte])] for byte in euro]
    found, pending = both.convert(tokens[:2], b"")
    assert (found, pending) == ([], euro[:2])
    found, pending = both.convert(tokens[2:], pending)
    assert (both.draft.bytes_of(found), pending) == (euro, b"")
    letter = both.target.forms["x"]
    assert both.convert([tokens[0], letter], b"") == ([both.draft_ids[letter]], b""), (
        "never completed"
    )


@pytest.mark.parametrize(
    ("data", "text", "rest"),
    [
        (b"abc", "abc", b""),
        ("aé".encode()[:2], "a", b"\xc3"),
        (b"\xa9a\xff", "a", b""),
        ("東".encode()[:2], "", "東".encode()[:2]),
    ],
)
def test_complete(data: bytes, text: str, rest: bytes) -> None:
    assert complete(data) == (text, rest)


def test_text_behind_text() -> None:
    """What is tokenised along stays out of the result, and where a token would straddle the border
    the text is tokenised without it."""
    byte = vocabulary("byte")
    whole = byte.encode("The quick brown fox")
    cut = len(byte.encode("The quick"))
    assert byte.encode_after("The quick", " brown fox") == whole[cut:]
    pieces = [piece.decode() for piece in byte.pieces if piece.isascii()]
    word = next(p for p in pieces if len(p) > 2 and byte.encode(p) == [byte.ids[p.encode()]])
    assert byte.encode_after(word[:1], word[1:]) is None
    assert byte.bytes_of(byte.spell(word[1:], word[:1])) == word[1:].encode()
    unigram = vocabulary("unigram")
    assert unigram.bytes_of(unigram.spell("own")) == b"own", "and no space before it"
    assert vocabulary("wordpiece").spell("Fox") == [vocabulary("wordpiece").forms["fox"]]


@pytest.mark.parametrize("role", ["target", "draft"])
def test_without_a_tokenizer(role: str) -> None:
    with_one, without = model("byte"), tiny()
    models = (without, with_one) if role == "target" else (with_one, without)
    with pytest.raises(VocabularyMismatchError, match=f"the {role} has no tokenizer.*HFModel"):
        Bridge(*models)


def test_nothing_in_common() -> None:
    def known(*names: str) -> HFModel:
        return HFModel(tiny_module(vocab_size=len(names)), words(names))

    both = Bridge(known("<unk>", "a", "b"), known("c", "d", "<unk>"))
    assert both.draft_ids == {0: 2}, "the unknown word, which says nothing"
    with pytest.raises(VocabularyMismatchError, match=r"no token .* in both .*method='slem'"):
        Shared(both, torch.device("cpu"))
