"""Two vocabularies side by side: shared tokens, and the target's text in the draft's tokens.

Legend: B rows, S shared tokens, U the draft's vocabulary, V the target's vocabulary.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from outrider.core.errors import VocabularyMismatchError
from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.hf.vocabulary import Vocabulary, complete


class Bridge:
    """Translates the target's tokens to the draft's, and back.

    Args:
        target: the model whose tokens are committed.
        draft: the model that drafts, in tokens of its own.

    Attributes:
        target: its vocabulary.
        draft: its vocabulary.
        mates: the draft's id of each of the target's tokens that exists in both vocabularies, one
            to one.

    Raises:
        VocabularyMismatchError: a model without a tokenizer.
    """

    def __init__(self, target: HFModel, draft: HFModel) -> None:
        self.target = _vocabulary(target, "target")
        self.draft = _vocabulary(draft, "draft")
        self.mates = _mates(self.target, self.draft)
        self._spelled: dict[str, list[int]] = {}

    @property
    def homes(self) -> dict[int, int]:
        """The target's id of each of the draft's tokens that exists in both vocabularies."""
        return {theirs: ours for ours, theirs in self.mates.items()}

    def translate(self, prompt: Sequence[int]) -> list[int]:
        """A prompt in the draft's tokens; never empty.

        Where the prompt's tokens are those that the target's tokenizer gives its text, the draft's
        tokenizer tokenises that text; other tokens are translated one by one. The special tokens
        that the target's tokenizer puts before a text are replaced by those of the draft's; other
        special tokens that the draft does not have are left out.
        """
        decoder_prompt, rest = self.target.decoder_prompt, list(prompt)
        tokens: list[int] = []
        if rest[: len(decoder_prompt)] == decoder_prompt:
            tokens, rest = list(self.draft.decoder_prompt), rest[len(decoder_prompt) :]
        for special, run in groupby(rest, self.target.is_special):
            part = list(run)
            tokens += self.mated(part, b"")[0] if special else self._translate_text(part)
        return tokens or [self.draft.beginning]

    def mated(self, tokens: Sequence[int], pending: bytes) -> tuple[list[int], bytes]:
        """Translates token by token: to the draft's same token, or the draft's tokens for its text.

        Args:
            tokens: the target's tokens.
            pending: bytes before them of an incomplete character.

        Returns:
            The draft's tokens, and the bytes that are pending now.
        """
        done: list[int] = []
        for token in tokens:
            if token in self.mates:
                pending = b""
                done.append(self.mates[token])
            elif token < len(self.target.pieces):
                text, pending = complete(pending + self.target.pieces[token])
                done += self._spell(text) if text else []
        return done, pending

    def _translate_text(self, tokens: list[int]) -> list[int]:
        text = self.target.decode(tokens)
        if self.target.encode(text) == tokens:
            return self.draft.encode(text)
        return self.mated(tokens, b"")[0]

    def _spell(self, text: str) -> list[int]:
        if text not in self._spelled:
            self._spelled[text] = self.draft.spell(text)
        return self._spelled[text]


def _mates(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Pairs tokens with the same bytes: by bytes alone, then, of the others, by their spelling
    as well."""
    mates = {token: draft.ids[name] for name, token in target.ids.items() if name in draft.ids}
    taken = set(mates.values())
    for form, token in target.forms.items():
        mate = draft.forms.get(form)
        if mate is None or mate in taken or token in mates:
            continue
        if target.pieces[token] == draft.pieces[mate]:
            mates[token] = mate
    return mates


def _vocabulary(model: HFModel, role: str) -> Vocabulary:
    if model.tokenizer is None:
        raise VocabularyMismatchError(
            f"the {role} has no tokenizer, without which vocabularies cannot be compared: load it "
            f"from a folder with one, or pass HFModel(module, tokenizer)"
        )
    return Vocabulary(model.tokenizer, model.num_tokens)


class Shared:
    """The tokens that exist in both vocabularies, as tensors on the draft's device.

    Raises:
        VocabularyMismatchError: no token is in both vocabularies, or only special tokens are.
    """

    def __init__(self, bridge: Bridge, device: torch.device) -> None:
        if not any(bridge.target.pieces[token] for token in bridge.mates):
            raise VocabularyMismatchError(
                "no token exists in both vocabularies, so there is none to draft: take another "
                "draft, or method='slem', which compares texts"
            )
        self.num_tokens = bridge.target.num_tokens
        self._target_S = torch.tensor(list(bridge.mates), device=device)
        self._draft_S = torch.tensor(list(bridge.mates.values()), device=device)
        self.is_shared_V = torch.zeros(self.num_tokens, dtype=torch.bool, device=device)
        self.is_shared_V[self._target_S] = True
        self._mate_V = torch.zeros(self.num_tokens, dtype=torch.int64, device=device)
        self._mate_V[self._target_S] = self._draft_S

    def logits(self, logits_BU: Tensor) -> Tensor:
        """The draft's logits (B, U) under the target's ids, (B, V); -inf for missing tokens."""
        logits_BV = logits_BU.new_full((logits_BU.shape[0], self.num_tokens), -torch.inf)
        return logits_BV.index_copy_(1, self._target_S, logits_BU.index_select(1, self._draft_S))

    def mate(self, token_B: Tensor) -> Tensor:
        """The draft's ids of shared tokens of the target, (B,)."""
        return self._mate_V[token_B]
