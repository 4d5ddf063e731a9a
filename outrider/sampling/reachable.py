"""Which positions logits processors are called for: those that plain decoding could reach.

Processors are written for plain decoding and may rely on its prefixes: without an end token, within
the maximum length, and made only of tokens that the processors themselves allowed, or that are
forced (``Sampling.forced``) whatever they say. The ``PrefixConstrainedLogitsProcessor`` of
``transformers`` raises an error where nothing may follow; a grammar has no state for a prefix that
it forbids. Drafts contain such prefixes, because they may run past the end, and because copied
tokens were never shown to a processor. (A stop string can only be found in the decoded text, so
processors are called for prefixes that run past one.)

A context without ``ends`` does not belong to a running sequence; then processors are called for all
positions that exist.

Legend: B rows, N nodes, M positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from outrider.core import Prefix
from outrider.sampling.params import Sampling


def reachable_positions(
    samplings: Sequence[Sampling], prefix: Prefix, z_BMV: Tensor
) -> Iterator[tuple[int, int]]:
    """The row and index of each position to call the processors for, parents before children.

    Before it advances the iterator, the caller writes the processed logits of the position into
    ``z_BMV``: a node whose token they forbid is skipped, together with its descendants, unless the
    token is forced there.
    """
    open_BM = prefix.is_open_BM.tolist()
    for b, sampling in enumerate(samplings):
        if not sampling.processors:
            continue
        tree = _Allowed(sampling, prefix, b, z_BMV[b])
        for m in range(z_BMV.shape[1]):
            if open_BM[b][m] and tree.allows(m):
                yield b, m


class _Allowed:
    """Which nodes of a row's draft hold tokens that the processors allow, or that are forced there.
    Without a draft, all positions are allowed."""

    def __init__(self, sampling: Sampling, prefix: Prefix, b: int, z_MV: Tensor) -> None:
        self._forced = sampling.forced
        self._z_MV = z_MV
        self._allowed: set[int] = {0}
        self._draft = None if prefix.context.ends is None else prefix.draft
        if self._draft is None:
            return
        self._tokens: list[int] = self._draft.tokens_BN[b].tolist()
        self._parents: list[int] = self._draft.parents_BN[b].tolist()
        self._positions = (
            _output_positions(prefix, b) if sampling.forced else [0] * len(self._tokens)
        )

    def allows(self, m: int) -> bool:
        """Whether plain decoding could reach node m. Call it for parents before children."""
        if self._draft is None or m == 0:
            return True
        parent, token = self._parents[m], self._tokens[m]
        if parent not in self._allowed:
            return False
        forced = self._forced.get(self._positions[m])
        if forced is not None and token != forced:
            return False
        if forced is None and not bool(self._z_MV[parent, token] > -float("inf")):
            return False
        self._allowed.add(m)
        return True


def _output_positions(prefix: Prefix, b: int) -> list[int]:
    """The position in the output of each node's token."""
    context = prefix.context
    num_output = context.lengths[b] - int(context.prompt_length_B[b])
    return [num_output + len(path) - 1 for path in prefix.paths[b]]
