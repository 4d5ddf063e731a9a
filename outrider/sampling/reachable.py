"""Where logits processors are asked: at places that plain decoding could come to.

Processors are written for plain decoding, and may rely on what it shows them: prefixes without an
end token, no longer than the sequence may get, in which every token is one that the processors
themselves allowed. ``transformers``' ``PrefixConstrainedLogitsProcessor`` raises where nothing may
follow; a grammar has no state for a prefix that it forbids. Drafts hold such prefixes: they run
past the end, and copied tokens ask nobody. (Where a stop string ends a sequence shows in the
decoded text only: prefixes behind one are asked about.)

A context without ``ends`` belongs to no running sequence; then all places that exist are asked
about.

Legend: B rows, M places, V vocabulary.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from outrider.core import Prefix
from outrider.sampling.params import Sampling


def reachable_positions(
    samplings: Sequence[Sampling], prefix: Prefix, z_BMV: Tensor
) -> Iterator[tuple[int, int]]:
    """The row and number of each place to ask processors about, parents before children.

    The caller writes what they answer into ``z_BMV`` before it takes the next place: a place behind
    a token that they have forbidden is left out, and so is everything behind it.
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
    """Which nodes of a row's draft hold tokens that the processors allow; all without a draft."""

    def __init__(self, sampling: Sampling, prefix: Prefix, b: int, z_MV: Tensor) -> None:
        self._forced = sampling.forced
        self._z_MV = z_MV
        self._allowed: set[int] = {0}
        self._draft = None if prefix.context.ends is None else prefix.draft
        if self._draft is None:
            return
        self._tokens: list[int] = self._draft.tokens_BN[b].tolist()
        self._parents: list[int] = self._draft.parents_BN[b].tolist()
        self._places = _output_places(prefix, b) if sampling.forced else [0] * len(self._tokens)

    def allows(self, m: int) -> bool:
        """Whether the row may come to node m; to be asked of parents first."""
        if self._draft is None or m == 0:
            return True
        parent, token = self._parents[m], self._tokens[m]
        if parent not in self._allowed or self._forced.get(self._places[m], token) != token:
            return False
        if not bool(self._z_MV[parent, token] > -float("inf")):
            return False
        self._allowed.add(m)
        return True


def _output_places(prefix: Prefix, b: int) -> list[int]:
    """Where in the output each node's token stands."""
    context = prefix.context
    begun = context.lengths[b] - int(context.prompt_length_B[b])
    return [begun + len(path) - 1 for path in prefix.paths[b]]
