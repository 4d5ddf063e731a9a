"""Reads the prompt, unchanged, from an argument, a file or standard input."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.errors import fail

if TYPE_CHECKING:
    from outrider.engine import Engine
    from outrider.engine.chat import Message

_EXAMPLE = 'outrider generate "def fibonacci(n):"'


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt of a command that takes one.

    Raises:
        BadInputError: none or two prompts were given, or it is empty, unreadable or not UTF-8.
    """
    if prompt is not None and file is not None:
        raise fail("both a PROMPT and --file were given: choose one")
    if file is not None and str(file) != "-":
        text = _decode(_read(file), str(file))
    elif prompt == "-" or file is not None:
        text = _decode(sys.stdin.buffer.read(), "standard input")
    elif prompt is None:
        raise fail(f"no prompt: pass a text, -f FILE, or - for standard input, as in {_EXAMPLE}")
    else:
        text = _decode(prompt.encode("utf-8", "surrogateescape"), "the argument")
    if not text:
        raise fail(f"the prompt is empty: pass the text to continue, as in {_EXAMPLE}")
    return text


def read_chat(chat: str, system: str | None) -> "list[Message]":
    """The conversation of one message, after a system prompt if there is one.

    Raises:
        BadInputError: the message is empty or not UTF-8.
    """
    if chat == "-":
        text = _decode(sys.stdin.buffer.read(), "standard input")
    else:
        text = _decode(chat.encode("utf-8", "surrogateescape"), "--chat")
    if not text:
        raise fail('--chat "": the message is empty: pass what the model is to answer')
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a file: one per line, or one JSON object per line. Skips empty lines."""
    lines = [line for line in read_prompt(None, file).splitlines() if line.strip()]
    if file.suffix != ".jsonl":
        return lines
    prompts = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError):
            prompt = None
        if not isinstance(prompt, str):
            raise fail(
                f"{file}, entry {number}: no JSON object with a 'prompt' that is a string, such as "
                f'{{"prompt": "def f(x):"}}'
            )
        prompts.append(prompt)
    return prompts


def encode_prompts(
    engine: "Engine", prompts: list[str], new_tokens: int, option: str
) -> list[tuple[int, ...]]:
    """The token ids of prompts that leave room for new tokens in the context of all models.

    Args:
        engine: encodes them.
        prompts: what to encode.
        new_tokens: after each prompt.
        option: that sets their number.

    Raises:
        BadInputError: a prompt is too long.
    """
    encoded = [engine.encode(prompt) for prompt in prompts]
    longest = max(map(len, encoded))
    if longest + new_tokens > engine.shared_limit:
        raise fail(
            f"a prompt of {longest} tokens and {new_tokens} new ones do not fit into the context "
            f"of {engine.shared_limit}: shorten the prompt, or use a smaller {option}"
        )
    return encoded


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise fail(f"cannot read prompt file '{file}': {error.strerror or error}") from error


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise fail(
            f"the prompt in {name} is not UTF-8 text (byte {error.start}): convert it first"
        ) from error
