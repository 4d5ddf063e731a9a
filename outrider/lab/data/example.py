"""A prompt with what is known about it, and a named set of such prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.engine.chat import Message


@dataclass(frozen=True)
class Turn:
    """A later message of the user, which follows the model's own answer to the one before.

    Attributes:
        text: the message.
        reference: the reference answer to it, if there is one.
    """

    text: str
    reference: str | None = None


@dataclass(frozen=True)
class Example:
    """A prompt of a data set.

    Attributes:
        prompt: a text to continue, or the messages of a conversation, which go through the
            tokenizer's chat template.
        reference: the reference answer; None where there is none.
        task: the kind of task, such as ``translation``; empty where the data set has one kind.
        id: the example's name in its data set.
        extra: what else the data set says of it, such as the tests of a programming task.
        later: the user's further messages, in order.
        forced: whether the output is the reference answer, whatever the models predict.
    """

    prompt: str | tuple[Message, ...]
    reference: str | None = None
    task: str = ""
    id: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    later: tuple[Turn, ...] = ()
    forced: bool = False

    @property
    def messages(self) -> tuple[Message, ...]:
        """The conversation; a text is the user's first message."""
        if isinstance(self.prompt, str):
            return ({"role": "user", "content": self.prompt},)
        return self.prompt

    @property
    def turns(self) -> Iterator[Example]:
        """The example at each of its turns, the later ones without the answers that they follow."""
        yield self
        for turn in self.later:
            yield replace(self, prompt=turn.text, reference=turn.reference, later=())

    def after(self, answer: str) -> Example:
        """The example of the next turn, whose conversation contains the model's answer to this
        one. There must be a later turn."""
        turn, *later = self.later
        added = (
            {"role": "assistant", "content": answer},
            {"role": "user", "content": turn.text},
        )
        return replace(
            self,
            prompt=(*self.messages, *added),
            reference=turn.reference,
            later=tuple(later),
        )


@dataclass(frozen=True)
class DataSet:
    """Examples, and where they came from.

    Attributes:
        name: the name in tables.
        examples: the prompts, in the order of the file.
        sha256: of the whole file, and of MT-bench's reference answers beside it; of the records
            where there is no file.
        source: what the user gave: a path, ``builtin:NAME`` or ``hf:NAME:SPLIT:FIELD``.
        layout: the layout that was recognised, such as ``spec-bench``.
    """

    name: str
    examples: tuple[Example, ...]
    sha256: str
    source: str
    layout: str

    def __len__(self) -> int:
        return len(self.examples)

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)

    @property
    def num_turns(self) -> int:
        """The requests that one run over the data set makes."""
        return sum(1 + len(example.later) for example in self.examples)

    def as_dict(self) -> dict[str, Any]:
        """The data set without its examples, for results."""
        return {
            "name": self.name,
            "source": self.source,
            "layout": self.layout,
            "sha256": self.sha256,
            "examples": len(self.examples),
        }
