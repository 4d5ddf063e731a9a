"""Pieces of text where tokens and characters do not line up."""

from outrider.engine.detokenize import Detokenizer


class Bytes:
    """A tokenizer whose tokens are the bytes of UTF-8."""

    def decode(self, tokens: list[int], **options: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def pieces(prompt: bytes, output: bytes) -> list[str]:
    detokenizer = Detokenizer(Bytes(), prompt)  # type: ignore[arg-type]
    return [*(detokenizer.push([byte]) for byte in output), detokenizer.flush()]


def test_a_prompt_that_ends_inside_a_character_gets_it_completed() -> None:
    emoji = "😀".encode()
    assert pieces(b"a " + emoji[:2], emoji[2:] + b"x") == ["", "😀", "x", ""]


def test_a_character_appears_whole_and_once() -> None:
    assert pieces(b"a ", "é😀b".encode()) == ["", "é", "", "", "", "😀", "b", ""]


def test_bytes_that_never_become_a_character_come_out_replaced_at_the_end() -> None:
    assert pieces(b"a", b"\xf0\x9f") == ["", "", "\ufffd"]


def test_a_replacement_character_in_the_text_is_kept() -> None:
    assert "".join(pieces("a\ufffd".encode(), "b\ufffdc".encode())) == "b\ufffdc"
