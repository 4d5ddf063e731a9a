"""A draft with a chosen acceptance rate: what a draft of that quality would gain if it were free.

It separates an engine's overhead from the quality of drafts. (vLLM has such a mode in its rejection
sampler, which then emits tokens that no model wrote.) Here the output stays the target's own:

    first run     nothing is drafted; the drafter remembers the output of plain decoding
    later runs    x_i = y_i where u_i < a,  else another token;   y the remembered output

The rule ``Coupled`` (at temperature 0 ``Greedy``) emits y whatever is drafted, so each drafted
token that is verified is accepted with probability a, independently of all others, at any
temperature. Of γ tokens a (1 - a^γ) / (1 - a) are accepted on average.

An output is found again by its prompt and its random numbers: the same seed, the same prompt, the
same rank among equal prompts. If the new output differs from the remembered one, because the
temperature or the model has changed, the drafter stops drafting and remembers the new one. So a
benchmark calls ``generate`` twice and times the second call.

The time that a real drafter takes, and the cost of its distributions, are not included: the result
is a bound.

Proposes: chosen chains; none in the first run.

Legend: B rows, N nodes (node 0 is the root), D drafted tokens (N-1).
"""

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor
from torch.nn.functional import pad

from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Role,
    Scores,
    Stream,
)
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import HostState, chain

Name = tuple[int, tuple[int, ...]]
"""A row's random-number key and its prompt."""


class Rehearsed:
    """One row's tokens, and those of the run before.

    Args:
        memory: the remembered sequences by name.
        name: this row's name.
    """

    def __init__(self, memory: dict[Name, list[int]], name: Name) -> None:
        self._text: list[int] = []
        self._memory = memory
        self._name = name
        self._known = memory.get(name, [])

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens. From the first one that differs on, this run is remembered."""
        begin = len(self._text)
        self._text.extend(tokens)
        if self._known[begin : len(self._text)] != list(tokens):
            self._known = []
            self._memory[self._name] = self._text

    def forget(self, num: int) -> None:
        """Forgets the last ``num`` tokens."""
        del self._text[len(self._text) - num :]

    def close(self) -> None:
        """Nothing: the memory shares the list of tokens."""

    def continuation(self, most: int) -> Sequence[int]:
        """The next tokens of the run before, ``most`` at most; none if this run differs."""
        return self._known[len(self._text) : len(self._text) + most]


class Synthetic:
    """Drafts the output of an earlier run, each token right with probability ``acceptance``.

    Args:
        num_tokens: width of the target's logits.
        acceptance: a, the probability that a drafted token which is verified is accepted.

    Raises:
        InvalidParameterError: a rate outside [0, 1].
    """

    drawn: Drawn = "chosen"
    capabilities: Capabilities = Capabilities(rewindable=True)

    def __init__(self, num_tokens: int, acceptance: float = 0.8) -> None:
        if not 0 <= acceptance <= 1:
            raise InvalidParameterError(f"acceptance={acceptance!r}: must be in [0, 1]")
        self.num_tokens = num_tokens
        self.acceptance = acceptance
        self.memory: dict[Name, list[int]] = {}

    def start(self, context: Context) -> HostState[Rehearsed]:
        keys = context.key_B.tolist()
        prompts = [
            tuple(line[:length])
            for line, length in zip(context.tokens_BT.tolist(), context.lengths, strict=True)
        ]
        names = list(zip(keys, prompts, strict=True))
        return HostState(context, lambda row: Rehearsed(self.memory, names[row]))

    def propose(
        self, state: HostState[Rehearsed], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        state.catch_up()
        found = [reader.continuation(budget.max_tokens) for reader in state.readers]
        draft = chain(state, found, budget)
        tokens_BN = self._spoiled(draft.tokens_BN, rng)
        return replace(draft, tokens_BN=tokens_BN)

    def commit(
        self, state: HostState[Rehearsed], draft: Draft, verdict: Acceptance, scores: Scores
    ) -> None:
        """Nothing: the next draft reads the context."""

    def join(self, state: HostState[Rehearsed], other: HostState[Rehearsed]) -> None:
        state.join(other)

    def _spoiled(self, tokens_BN: Tensor, rng: Stream) -> Tensor:
        """The tokens, each but the root's replaced by the next token id with probability 1 - a."""
        D = tokens_BN.shape[1] - 1
        if not D:
            return tokens_BN
        wrong_BD = rng.uniform(Role.DRAFT, D) >= self.acceptance
        return (tokens_BN + pad(wrong_BD, (1, 0)).long()) % self.num_tokens
