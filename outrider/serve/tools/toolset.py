"""The functions of a request with the format in which the model calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from transformers import PreTrainedTokenizerBase

from outrider.engine.chat import Message, encode_messages
from outrider.sampling import Grammar
from outrider.serve.errors import ApiError
from outrider.serve.tools.fields import ToolUse
from outrider.serve.tools.formats import FORMATS, CallFormat, format_of
from outrider.serve.tools.grammar import grammar_of, names_of
from outrider.serve.tools.reply import Reply

_known: WeakKeyDictionary[PreTrainedTokenizerBase, dict[str, CallFormat | None]] = (
    WeakKeyDictionary()
)


@dataclass(frozen=True)
class Toolset:
    """What an answer may call, and how.

    Attributes:
        use: the functions, and whether the answer must call them.
        format: how the model writes calls.
        tokenizer: the model's.
    """

    use: ToolUse
    format: CallFormat
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def of(
        cls, use: ToolUse, tokenizer: PreTrainedTokenizerBase | None, model_name: str
    ) -> Toolset:
        """The set for a model.

        Raises:
            ApiError: its chat template tells of no tools, or writes calls in an unknown format.
        """
        template = getattr(tokenizer, "chat_template", None)
        if tokenizer is None or not template:
            raise ApiError(
                f"tools: {model_name} has no chat template, so it calls no functions: leave out "
                f"tools, or set tool_choice='none'",
                param="tools",
            )
        formats = _known.setdefault(tokenizer, {})
        key = repr(template)
        if key not in formats:
            formats[key] = format_of(tokenizer)
        format = formats[key]
        if format is None:
            known = ", ".join(each.name for each in FORMATS)
            raise ApiError(
                f"tools: the chat template of {model_name} does not tell it of tools, or its calls "
                f"have a format that this server does not read (it reads {known}): leave out "
                f"tools, or set tool_choice='none'",
                param="tools",
            )
        return cls(use, format, tokenizer)

    def encode(self, messages: Sequence[Message], model_name: str) -> tuple[int, ...]:
        """A conversation's token ids, the functions told; raises PromptError where the template
        refuses it."""
        return encode_messages(self.tokenizer, messages, model_name, self.use.definitions)

    def grammar(self, answer: Grammar | None) -> Grammar | None:
        """What the answer may be; raises ApiError as :func:`grammar_of`."""
        return grammar_of(self.use, self.format, self.tokenizer, answer)

    def reply(self) -> Reply:
        """What reads an answer."""
        return Reply(self.format, names_of(self.use.functions), self.use.parallel)
