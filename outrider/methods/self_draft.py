"""Staged drafting, and drafting with the target's own first layers."""

from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import InvalidParameterError
from outrider.core.protocols import Drafter
from outrider.drafters.chain.early_exit import EarlyExitDrafter
from outrider.drafters.chain.staged import INNER_TOKENS, StagedDrafter
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.drafters.ngram.drafter import NgramDrafter, check_vocabulary
from outrider.drafters.ngram.table import NgramTable
from outrider.methods.method import Method, Parts
from outrider.runtime.hf.early_exit import EarlyExit
from outrider.verifiers import Greedy, Rejection

Inner = Literal["lookup", "ngram"]


@dataclass(frozen=True)
class ExitLayer:
    """The number of layers that draft; None stands for half of them."""

    number: int | None = None

    @classmethod
    def parse(cls, value: object) -> "ExitLayer":
        """Reads ``half`` or a whole number.

        Raises:
            InvalidParameterError: anything else.
        """
        if isinstance(value, str) and value == "half":
            return cls()
        try:
            return cls(int(f"{value}"))
        except ValueError:
            raise InvalidParameterError("must be 'half' or a whole number of layers") from None

    def __str__(self) -> str:
        return "half" if self.number is None else str(self.number)


def _staged(
    parts: Parts, *, inner: Inner = "lookup", inner_tokens: int = INNER_TOKENS, file: str = ""
) -> StagedDrafter:
    width = parts.target.num_tokens
    cheap: Drafter[Any] = PromptLookup()
    if inner == "ngram":
        if not file:
            raise InvalidParameterError(
                "method 'staged' with inner=ngram drafts from a file, and option 'file' names "
                "none: build one with `outrider ngram build`, then set file=FILE"
            )
        table = NgramTable.open(file)
        check_vocabulary(table, file, parts.target)
        cheap = NgramDrafter(table, width, dtype=parts.target.dtype)
    return StagedDrafter(
        parts.draft_model, width, cheap, Rejection(), Greedy(), inner_tokens, stop=parts.stop
    )


HALF = ExitLayer()


def _early_exit(parts: Parts, *, layer: ExitLayer = HALF) -> EarlyExitDrafter:
    number = parts.target.num_layers // 2 if layer.number is None else layer.number
    return EarlyExitDrafter(EarlyExit(parts.target, number), parts.stop)


SELF_DRAFTS = (
    Method(
        "staged",
        "A draft model's chain, which is itself drafted by lookup or from an n-gram file.",
        "Spector and Ré, 2023",
        "draft model",
        Rejection,
        _staged,
    ),
    Method(
        "early-exit",
        "The target's first layers draft; its own pass computes only the remaining layers.",
        "Elhoushi et al. (LayerSkip), ACL 2024",
        "nothing",
        Rejection,
        _early_exit,
    ),
)
