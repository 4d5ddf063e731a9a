"""Prompts that a chat target writes itself.

Magpie (Xu et al. 2024, https://arxiv.org/abs/2406.08464): a chat model that is given the tokens
that come before a user's message, and nothing else, writes such a message.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from outrider.core.errors import PromptError
from outrider.engine import Engine
from outrider.sampling import Sampling
from outrider.train.distill.prompts import key_of

MESSAGE_TOKENS = 192
"""Most tokens of a message."""
CHUNK = 64
"""Attempts at messages between two files."""
_MARK = "outrider-marks-the-user-message"


def user_turn(tokenizer: PreTrainedTokenizerBase | None, name: str) -> tuple[int, ...]:
    """The tokens that come before a user's message.

    Raises:
        PromptError: the tokenizer has no chat template, or one that hides the message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            f"{name} has no chat template, so it cannot write prompts itself; give a file or "
            f"folder of prompts"
        )
    assert tokenizer is not None
    messages = [{"role": "user", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert isinstance(text, str)
    before, found, _ = text.partition(_MARK)
    if not found or not before:
        raise PromptError(
            f"the chat template of {name} writes nothing before a user's message, so {name} cannot "
            f"write prompts itself; give a file or folder of prompts"
        )
    return tuple(tokenizer(before, add_special_tokens=False)["input_ids"])


def write_prompts(
    engine: Engine,
    num: int,
    seed: int,
    folder: Path,
    report: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[str]:
    """Distinct user messages that a chat target writes itself at temperature 1.

    Messages that are cut off by ``MESSAGE_TOKENS``, and repeated ones, are dropped and replaced by
    others, up to four times as many as were asked for.  They are kept in files of ``CHUNK``
    attempts, and an interrupted call goes on after those.

    Args:
        engine: decodes the target.
        num: how many messages.
        seed: of the random numbers.
        folder: of the files.
        report: told what is being made, how much is done, and how much there is.

    Raises:
        PromptError: a target without a chat template, or one that wrote too few messages.
    """
    tokens = user_turn(engine.target.tokenizer, engine.target.name)
    messages: dict[str, str] = {}
    begin = 0
    while len(messages) < num and begin < 4 * num:
        path = folder / f"{begin:08d}.json"
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_text(json.dumps(_attempts(engine, tokens, seed, begin), indent=1))
            partial.replace(path)
        for text in json.loads(path.read_text()):
            messages.setdefault(key_of(text), text)
        begin += CHUNK
        report("the target's prompts", min(len(messages), num), num)
    if len(messages) < num:
        raise PromptError(
            f"{engine.target.name} finished only {len(messages)} distinct messages in {begin} "
            f"attempts; ask for fewer prompts, or give a file of prompts"
        )
    return list(messages.values())[:num]


def _attempts(engine: Engine, tokens: tuple[int, ...], seed: int, begin: int) -> list[str]:
    """The finished messages of some attempts."""
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    results = engine.generate(
        [tokens] * CHUNK,
        Sampling(temperature=1.0, max_new_tokens=MESSAGE_TOKENS, seed=seed),
        request_numbers=range(begin, begin + CHUNK),
    )
    finished = [result.token_ids for result in results if result.finish_reason == "eos"]
    texts = [str(tokenizer.decode(list(ids), skip_special_tokens=True)).strip() for ids in finished]
    return [text for text in texts if text]
