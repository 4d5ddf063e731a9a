"""Pieces of text at characters that are split across tokens."""

from hypothesis import given
from hypothesis import strategies as st

from outrider.engine.detokenize import Detokenizer
from outrider.engine.stop import Ending
from outrider.sampling import Sampling


class Bytes:
    """A tokenizer whose tokens are UTF-8 bytes."""

    def decode(self, tokens: list[int], **options: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def pieces(prompt: bytes, output: bytes) -> list[str]:
    detokenizer = Detokenizer(Bytes(), prompt)  # type: ignore[arg-type]
    return [*(detokenizer.push([byte]) for byte in output), detokenizer.flush()]


def test_a_character_that_begins_in_the_prompt_is_completed() -> None:
    emoji = "😀".encode()
    assert pieces(b"a " + emoji[:2], emoji[2:] + b"x") == ["", "😀", "x", ""]


def test_a_character_appears_whole_and_once() -> None:
    assert pieces(b"a ", "é😀b".encode()) == ["", "é", "", "", "", "😀", "b", ""]


def test_an_incomplete_character_is_replaced_at_the_end() -> None:
    assert pieces(b"a", b"\xf0\x9f") == ["", "", "\ufffd"]


def test_a_replacement_character_in_the_text_is_kept() -> None:
    assert "".join(pieces("a\ufffd".encode(), "b\ufffdc".encode())) == "b\ufffdc"


@given(
    st.lists(st.sampled_from([*"aé😀".encode(), *"\ufffd".encode(), 0xFF]), max_size=12), st.data()
)
def test_the_text_is_the_same_whenever_it_is_read(output: list[int], data: st.DataObject) -> None:
    """Rounds of any length, with the text read in between or only at the end."""
    sampling = Sampling(max_new_tokens=len(output) + 1)
    asked, unasked = (
        Ending(sampling, (), 99, Detokenizer(Bytes(), b"a\xc3"))  # type: ignore[arg-type]
        for _ in range(2)
    )
    shown = ""
    rest = [*output, 10]
    while rest:
        tokens = rest[: data.draw(st.integers(1, len(rest)), "round")]
        rest = rest[len(tokens) :]
        assert asked.take(tokens) == unasked.take(tokens) == len(tokens)
        if data.draw(st.booleans(), "asks"):
            shown += asked.shown()
    assert asked.reason == "length"
    assert shown + asked.shown() == asked.text == unasked.text


def test_nothing_is_decoded_before_the_text_is_read() -> None:
    calls: list[int] = []

    class Counted(Bytes):
        def decode(self, tokens: list[int], **options: bool) -> str:
            calls.append(1)
            return super().decode(tokens, **options)

    ending = Ending(Sampling(max_new_tokens=9), (), 99, Detokenizer(Counted(), b"a"))  # type: ignore[arg-type]
    for _ in range(3):
        ending.take([97, 98, 99])
    assert not calls
    assert ending.text == "abcabcabc"
    assert calls
