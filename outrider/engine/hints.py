"""Warnings about what a user may have overlooked, once per engine."""

import re
import warnings
from typing import Any

from transformers import PreTrainedTokenizerBase

from outrider.core.errors import OutriderWarning
from outrider.engine.request import Row

_MARKER = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_]{2,20}\]")  # <|im_start|>, <s>, [INST], [/INST]


class ChatHint:
    """Warns that a chat model ended its output at once because the prompt lacks its template.

    Args:
        tokenizer: the target's, which has a chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        template: Any = tokenizer.chat_template
        templates = template.values() if isinstance(template, dict) else [template]
        begins = getattr(tokenizer, "bos_token", None)
        self._markers = {each for text in templates for each in _MARKER.findall(text)} - {begins}
        self._due = True

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase | None) -> "ChatHint | None":
        """The hint for models with this tokenizer; None for models that are no chat models."""
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            return None
        return cls(tokenizer)

    def __call__(self, row: Row) -> None:
        """Warns the first time that a finished row's output is empty for this reason."""
        prompt = row.request.prompt
        if not self._due or not isinstance(prompt, str) or row.ending.reason != "eos":
            return
        empty = len(row.token_ids) == 1 or not row.ending.text.strip()
        if not empty or any(marker in prompt for marker in self._markers):
            return
        self._due = False
        warnings.warn(
            "the model ended its output at once; it is a chat model, and the prompt does not "
            "follow its template: give messages instead of a string, as in engine.chat([{'role': "
            "'user', 'content': ...}]) or --chat TEXT",
            OutriderWarning,
            stacklevel=1,
        )
