"""Which requests begin alike, and which replica they prefer.

A replica keeps the keys and values of prompts that it has read (``prefix_cache``). Requests that
begin alike, such as those of one conversation, therefore go to the same replica.

The preference is rendezvous hashing (Thaler and Ravishankar 1998, Using Name-Based Mappings to
Increase Hit Rates): each replica has a weight for each key, and the largest one wins. It needs no
state, so that all processes that route agree, and a replica that comes or goes moves only the keys
that it takes or had.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

PREFIX = 256
"""Characters, or tokens, of a prompt that are compared."""


def prefix_key(body: bytes) -> str | None:
    """A hash of how a request's prompt begins; None for a body without a prompt.

    Of a conversation that is everything up to the user's first message, which all its later
    requests contain. Of a text it is the first :data:`PREFIX` characters.
    """
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    begin = _begin(fields)
    if begin is None:
        return None
    return hashlib.blake2b(json.dumps(begin).encode(), digest_size=16).hexdigest()


def ranked(key: str, replicas: Iterable[str]) -> list[str]:
    """Replicas by their weight for a key, the largest first.

    Args:
        key: of a prefix.
        replicas: their names.
    """
    return sorted(replicas, key=lambda replica: _weight(key, replica), reverse=True)


def _weight(key: str, replica: str) -> bytes:
    return hashlib.blake2b(f"{key} {replica}".encode(), digest_size=16).digest()


def _begin(fields: dict[str, Any]) -> Any:
    conversation = fields.get("messages", fields.get("input"))
    if isinstance(conversation, list):
        begin = []
        for message in conversation:
            begin.append(message)
            if isinstance(message, dict) and message.get("role") == "user":
                break
        return [fields.get("instructions"), begin]
    prompt = conversation if conversation is not None else fields.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # of several prompts, the first one decides
    return prompt[:PREFIX] if isinstance(prompt, str | list) and prompt else None
