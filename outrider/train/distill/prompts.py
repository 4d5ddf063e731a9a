"""Prompts to distil on, from files and folders; deduplicated and split.

A prompt is a text to continue, a conversation, or the beginning of a document, and may come with
the answer that its author gave (the ground truth):

    FILE.jsonl   one JSON value per line: a string, a list of chat messages,
                 {"messages": [...]} or {"prompt": ..., "answer": ...}. An assistant's message at
                 the end is the answer.
    FILE         any other file: one prompt per line, without answers
    FOLDER       its text files: the first tokens of each window are the prompt, the rest the answer

A string is asked as the user's message where the tokenizer has a chat template, unless it is to be
continued as text.

Prompts of the same text, whitespace aside, are one.  One text in twenty is held out, by its hash,
so another prompt in the file never moves a text between the splits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.core.errors import PromptError
from outrider.core.values import shown
from outrider.engine.chat import Message, check_messages, encode_messages
from outrider.engine.prompts import is_chat
from outrider.train.corpus import read_utf8

TEXT_FILES = ("*.txt", "*.md", "*.py", "*.rst")
HELD_OUT_ONE_IN = 20
_FEWEST_HELD_OUT = 8  # texts, of forty or more
_FORMS = 'a string, a list of messages, {"messages": [...]} or {"prompt": "...", "answer": "..."}'


@dataclass(frozen=True)
class Prompt:
    """A prompt in tokens.

    Attributes:
        tokens: up to where the answer begins.
        answer: tokens of the ground truth; None if there is none.
        key: hexadecimal hash of the text that it comes from.
    """

    tokens: tuple[int, ...]
    answer: tuple[int, ...] | None
    key: str

    @property
    def held_out(self) -> bool:
        return int(self.key[:8], 16) % HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Reader:
    """How prompts become tokens.

    Attributes:
        tokenizer: the target's.
        name: how messages call the target.
        as_text: continue strings as text, even where the tokenizer has a chat template.
        window: tokens of a document that make one prompt with its answer.
        prompt_tokens: how many of these are the prompt.
    """

    tokenizer: PreTrainedTokenizerBase
    name: str
    as_text: bool = False
    window: int = 512
    prompt_tokens: int = 64

    def read(self, path: Path) -> list[Prompt]:
        """The prompts of a file or folder, each text once, in the order of their hashes.

        Raises:
            PromptError: no such path, nothing in it, a line that is no prompt, or a conversation
                for a model without a chat template.
        """
        if not path.exists():
            raise PromptError(f"no such file or folder: {path}")
        found = self._documents(path) if path.is_dir() else self._entries(path)
        prompts = distinct(found)
        if not prompts:
            kinds = ", ".join(TEXT_FILES)
            holds = f"text files ({kinds}) with {self.window // 2} tokens" if path.is_dir() else ""
            raise PromptError(
                f"{path} holds no {holds or 'prompts: write one per line'}; nothing to train on"
            )
        return prompts

    def encode(self, prompt: str | Sequence[Message], answer: str | None = None) -> Prompt:
        """One prompt, and the answer with what ends it."""
        key = key_of(prompt if isinstance(prompt, str) else json.dumps([dict(m) for m in prompt]))
        if isinstance(prompt, str):
            if self.as_text or not getattr(self.tokenizer, "chat_template", None):
                end = self.tokenizer.eos_token_id
                tokens = tuple(self.tokenizer(prompt)["input_ids"])
                ids = (
                    None if answer is None else self._ids(answer) + (() if end is None else (end,))
                )
                return Prompt(tokens, ids, key)
            prompt = [{"role": "user", "content": prompt}]
        tokens = encode_messages(self.tokenizer, prompt, self.name)
        return Prompt(tokens, None if answer is None else self._reply(prompt, answer), key)

    def _reply(self, messages: Sequence[Message], answer: str) -> tuple[int, ...]:
        """The tokens of an assistant's message, the template's end of turn included."""
        conversation = [dict(message) for message in messages]
        before = self.tokenizer.apply_chat_template(
            conversation, tokenize=False, add_generation_prompt=True
        )
        whole = self.tokenizer.apply_chat_template(
            [*conversation, {"role": "assistant", "content": answer}], tokenize=False
        )
        assert isinstance(before, str)
        assert isinstance(whole, str)
        if not whole.startswith(before):
            raise PromptError(
                f"the chat template of {self.name} writes a conversation differently once it has "
                f"its answer, so the answer's tokens are unknown: train on the target's answers"
            )
        return self._ids(whole[len(before) :].rstrip())

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _entries(self, path: Path) -> Iterator[Prompt]:
        is_json = path.suffix in (".jsonl", ".json")
        for number, line in enumerate(read_utf8(path).splitlines(), 1):
            if not line.strip():
                continue
            try:
                prompt, answer = _entry(json.loads(line)) if is_json else (line.strip(), None)
            except json.JSONDecodeError as error:
                raise PromptError(
                    f"{path}, line {number}: not JSON ({error.msg}); each line must be {_FORMS}"
                ) from None
            except PromptError as error:
                raise PromptError(f"{path}, line {number}: {error}") from None
            if prompt:
                yield self.encode(prompt, answer)

    def _documents(self, folder: Path) -> Iterator[Prompt]:
        files = sorted(file for pattern in TEXT_FILES for file in folder.rglob(pattern))
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            ids, key = self._ids(text), key_of(text)
            for begin in range(0, len(ids), self.window):
                window = ids[begin : begin + self.window]
                if len(window) >= self.window // 2:
                    first = min(self.prompt_tokens, len(window) // 2)
                    yield Prompt(window[:first], window[first:], key)


def distinct(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Each prompt once, in the order of the hashes, so that any first part is a random sample."""
    unique = {(prompt.key, prompt.tokens): prompt for prompt in prompts}
    return [unique[key] for key in sorted(unique)]


def split(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts for training and held-out ones.

    Where the hashes hold out fewer than eight texts, those with the lowest hashes join them, up to
    a fifth of all texts.

    Raises:
        PromptError: all prompts come from one text.
    """
    held = {prompt.key for prompt in prompts if prompt.held_out}
    keys = sorted({prompt.key for prompt in prompts})
    fewest = min(_FEWEST_HELD_OUT, max(1, len(keys) // 5))
    held.update([key for key in keys if key not in held][: max(0, fewest - len(held))])
    train = [prompt for prompt in prompts if prompt.key not in held]
    if not train:
        raise PromptError(
            f"{len(prompts)} prompts of {len(held)} texts leave nothing to train on beside the "
            f"held-out ones; give more prompts"
        )
    return train, [prompt for prompt in prompts if prompt.key in held]


def _entry(value: Any) -> tuple[str | Sequence[Message], str | None]:
    """A prompt and its answer from a JSON value."""
    answer = None
    if isinstance(value, dict) and "messages" in value:
        value = value["messages"]
    elif isinstance(value, dict):
        value, answer = value.get("prompt"), value.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise PromptError(f"answer={shown(answer)}: must be a string")
    if isinstance(value, str):
        return value.strip(), answer
    if not is_chat(value):
        raise PromptError(f"{shown(value)} is no prompt; each line must be {_FORMS}")
    messages = check_messages(value)
    if messages[-1]["role"] == "assistant" and len(messages) > 1:
        return messages[:-1], messages[-1]["content"]
    return messages, answer


def key_of(text: str) -> str:
    """The hash of a text, whatever its whitespace."""
    return hashlib.sha256(" ".join(text.split()).encode("utf-8", "replace")).hexdigest()
