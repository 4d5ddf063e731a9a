"""Two vocabularies: which tokens they share, and the target's text in the draft's tokens.

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
    """Converts the target's tokens to the draft's.

    Args:
        target: the model whose tokens are committed.
        draft: the model that drafts, in tokens of its own.

    Attributes:
        target: its vocabulary.
        draft: its vocabulary.
        draft_ids: the draft's id of every shared token, by the target's id; one to one.

    Raises:
        VocabularyMismatchError: a model without a tokenizer.
    """

    def __init__(self, target: HFModel, draft: HFModel) -> None:
        self.target = _vocabulary(target, "target")
        self.draft = _vocabulary(draft, "draft")
        self.draft_ids = _shared_ids(self.target, self.draft)
        self._spelled: dict[str, list[int]] = {}

    @property
    def target_ids(self) -> dict[int, int]:
        """The target's id of every shared token, by the draft's id."""
        return {draft: target for target, draft in self.draft_ids.items()}

    def translate(self, prompt: Sequence[int]) -> list[int]:
        """A prompt in the draft's tokens; never empty.

        Text whose tokens are those that the target's tokenizer gives is encoded by the draft's
        tokenizer; other text is converted token by token. The special tokens that the target's
        tokenizer puts at the beginning are replaced by the draft's; other special tokens that the
        draft lacks are left out.
        """
        decoder_prompt, rest = self.target.decoder_prompt, list(prompt)
        tokens: list[int] = []
        if rest[: len(decoder_prompt)] == decoder_prompt:
            tokens, rest = list(self.draft.decoder_prompt), rest[len(decoder_prompt) :]
        for special, run in groupby(rest, self.target.is_special):
            part = list(run)
            tokens += self.convert(part, b"")[0] if special else self._translate_text(part)
        return tokens or [self.draft.beginning]

    def convert(self, tokens: Sequence[int], pending: bytes) -> tuple[list[int], bytes]:
        """Converts token by token: to the shared token, or to the draft's tokens of its text.

        Args:
            tokens: tokens of the target.
            pending: bytes before them of a character that is not complete yet.

        Returns:
            The draft's tokens, and the bytes that are now pending.
        """
        done: list[int] = []
        for token in tokens:
            if token in self.draft_ids:
                pending = b""
                done.append(self.draft_ids[token])
            elif token < len(self.target.pieces):
                text, pending = complete(pending + self.target.pieces[token])
                done += self._spell(text) if text else []
        return done, pending

    def _translate_text(self, tokens: list[int]) -> list[int]:
        text = self.target.decode(tokens)
        if self.target.encode(text) == tokens:
            return self.draft.encode(text)
        return self.convert(tokens, b"")[0]

    def _spell(self, text: str) -> list[int]:
        if text not in self._spelled:
            self._spelled[text] = self.draft.spell(text)
        return self._spelled[text]


def _shared_ids(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Pairs tokens with the same bytes: by bytes alone, then, of the others, by their spelling
    as well."""
    shared = {token: draft.ids[name] for name, token in target.ids.items() if name in draft.ids}
    taken = set(shared.values())
    for form, token in target.forms.items():
        other = draft.forms.get(form)
        if other is None or other in taken or token in shared:
            continue
        if target.pieces[token] == draft.pieces[other]:
            shared[token] = other
    return shared


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
        if not any(bridge.target.pieces[token] for token in bridge.draft_ids):
            raise VocabularyMismatchError(
                "no token exists in both vocabularies, so there is none to draft: take another "
                "draft, or method='slem', which compares texts"
            )
        self.num_tokens = bridge.target.num_tokens
        self._target_S = torch.tensor(list(bridge.draft_ids), device=device)
        self._draft_S = torch.tensor(list(bridge.draft_ids.values()), device=device)
        self.is_shared_V = torch.zeros(self.num_tokens, dtype=torch.bool, device=device)
        self.is_shared_V[self._target_S] = True
        self._draft_id_V = torch.zeros(self.num_tokens, dtype=torch.int64, device=device)
        self._draft_id_V[self._target_S] = self._draft_S

    def logits(self, logits_BU: Tensor) -> Tensor:
        """The draft's logits (B, U) under the target's ids, (B, V); -inf for tokens not shared."""
        logits_BV = logits_BU.new_full((logits_BU.shape[0], self.num_tokens), -torch.inf)
        return logits_BV.index_copy_(1, self._target_S, logits_BU.index_select(1, self._draft_S))

    def to_draft(self, token_B: Tensor) -> Tensor:
        """The draft's ids of shared tokens of the target, (B,)."""
        return self._draft_id_V[token_B]
