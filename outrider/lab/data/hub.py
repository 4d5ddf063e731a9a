"""Records of data sets on the Hugging Face hub: ``hf:NAME[@CONFIG]:SPLIT[:FIELD]``.

``FIELD`` is the field that holds the prompt, a text or a conversation; without it the layout is
recognised by the fields. The package ``datasets`` is imported only here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256

from outrider.core.errors import InvalidParameterError
from outrider.lab.data.layouts import Record

PREFIX = "hf:"


@dataclass(frozen=True)
class HubSource:
    """The parts of an ``hf:`` address.

    Attributes:
        name: of the data set, such as ``openai/gsm8k``.
        config: of its configurations, such as ``main``; None takes the only one.
        split: such as ``test``.
        field: the field of the prompt; None recognises the layout.
    """

    name: str
    config: str | None
    split: str
    field: str | None

    @classmethod
    def parse(cls, address: str) -> HubSource:
        """Reads ``hf:NAME[@CONFIG]:SPLIT[:FIELD]``.

        Raises:
            InvalidParameterError: another form.
        """
        parts = address.removeprefix(PREFIX).split(":")
        if len(parts) not in (2, 3) or not all(parts):
            raise InvalidParameterError(
                f"data {address!r}: write hf:NAME:SPLIT:FIELD, such as hf:openai/gsm8k@main:test, "
                f"whose FIELD can be left out"
            )
        name, _, config = parts[0].partition("@")
        return cls(name, config or None, parts[1], parts[2] if len(parts) == 3 else None)

    def records(self) -> list[Record]:
        """All records of the split.

        Raises:
            InvalidParameterError: no ``datasets``, no network, no such data set, split or field.
        """
        try:
            from datasets import load_dataset
        except ImportError:
            raise InvalidParameterError(
                f"data hf:{self.name}: needs the package datasets: pip install 'outrider[data]'"
            ) from None
        try:
            rows = load_dataset(self.name, self.config, split=self.split)
        except Exception as error:  # of many kinds: network, hub, scripts, splits
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise InvalidParameterError(
                f"data hf:{self.name}: {reason}; without a network, give a file (.jsonl, .csv, "
                f".parquet) instead of hf:"
            ) from error
        return [self._named(dict(row)) for row in rows]

    def _named(self, record: dict[str, object]) -> Record:
        """The record with the field of the prompt under the name that layouts know."""
        if self.field is None:
            return record
        if self.field not in record:
            raise InvalidParameterError(
                f"data hf:{self.name}: no field {self.field!r}; there are {', '.join(record)}"
            )
        value = record.pop(self.field)
        return {"prompt" if isinstance(value, str) else "messages": value, **record}


def hash_of(records: list[Record]) -> str:
    """The sha256 of records that came from no file of the user's."""
    digest = sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True, default=str).encode())
    return digest.hexdigest()
