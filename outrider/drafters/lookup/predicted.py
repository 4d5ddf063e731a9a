"""Predicted outputs: drafts the continuation of an output that the user expects.

OpenAI, "Predicted Outputs", 2024, https://platform.openai.com/docs/guides/predicted-outputs: a
client that edits a document sends the document along, most of which the answer repeats. It is
LLMA's copying from a reference (Yang et al., 2023, https://arxiv.org/abs/2304.04487) with a
reference of the user's own and without a minimum match, since the output is expected to begin where
the reference begins.

    cursor = 0
    after output token x:    cursor += 1                             if reference[cursor] = x
                             cursor  = the end of the best match     if x occurs in the reference
                             nothing is drafted                      otherwise

The best match is the occurrence of the last tokens of the output with the longest common suffix; of
equal ones, the occurrence nearest to the cursor, and of those the later one.

Proposes: chosen chains, each row's from its own reference alone.

Legend: B rows.
"""

from collections import defaultdict
from collections.abc import Sequence

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Scores, Stream, Verdict
from outrider.drafters.lookup.host import HostState, chain

DEPTH = 16
LONGEST_MATCH = 16
"""Tokens that are compared to choose between occurrences."""


class PredictionReader:
    """One row's place in its expected output.

    Args:
        reference: the expected output.
        begin: position at which the row's output begins.
    """

    def __init__(self, reference: Sequence[int], begin: int) -> None:
        self._reference = tuple(reference)
        self._left_of_prompt = begin
        self._output: list[int] = []
        self._cursors: list[tuple[int, bool]] = [(0, True)]  # after each token of the output
        self._ends: defaultdict[int, list[int]] = defaultdict(list)
        for end, token in enumerate(self._reference, 1):
            self._ends[token].append(end)

    def extend(self, tokens: Sequence[int]) -> None:
        """Reads the next tokens; those of the prompt do not move the cursor."""
        skipped = min(self._left_of_prompt, len(tokens))
        self._left_of_prompt -= skipped
        for token in tokens[skipped:]:
            self._output.append(token)
            self._cursors.append(self._after(token))

    def forget(self, num: int) -> None:
        """Undoes the last ``num`` tokens."""
        undone = min(num, len(self._output))
        if undone:
            del self._output[-undone:], self._cursors[-undone:]
        self._left_of_prompt += num - undone

    def close(self) -> None:
        """Does nothing: no memory outlives the row."""

    def continuation(self, most: int) -> Sequence[int]:
        """At most ``most`` tokens after the cursor; none where the output has left the
        reference."""
        cursor, matches = self._cursors[-1]
        return self._reference[cursor : cursor + most] if matches else ()

    def _after(self, token: int) -> tuple[int, bool]:
        """The cursor after a token, the last one of the output, and whether it matches there."""
        cursor, matches = self._cursors[-1]
        if matches and self._reference[cursor : cursor + 1] == (token,):
            return cursor + 1, True
        ends = self._ends.get(token)
        if not ends:
            return cursor, False
        return max(ends, key=lambda end: (self._common(end), -abs(end - cursor), end)), True

    def _common(self, end: int) -> int:
        """How many of the output's last tokens are those before a position of the reference."""
        longest = min(end, len(self._output), LONGEST_MATCH)
        length = 0
        while length < longest and self._reference[end - 1 - length] == self._output[-1 - length]:
            length += 1
        return length


class PredictedOutput:
    """Drafts by copying each row's expected output (``Context.predictions``)."""

    drawn: Drawn = "chosen"
    capabilities: Capabilities = Capabilities(depth=DEPTH, rewindable=True)

    def start(self, context: Context) -> HostState[PredictionReader]:
        sources = context.sources or [()] * context.num_rows
        predictions = context.predictions or [()] * context.num_rows
        prompts = context.prompt_length_B.tolist()
        begins = [len(source) + n for source, n in zip(sources, prompts, strict=True)]
        return HostState(context, lambda row: PredictionReader(predictions[row], begins[row]))

    def propose(
        self, state: HostState[PredictionReader], context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        state.catch_up()
        found = [reader.continuation(budget.max_tokens) for reader in state.readers]
        return chain(state, found, budget)

    def commit(
        self, state: HostState[PredictionReader], draft: Draft, verdict: Verdict, scores: Scores
    ) -> None:
        """Does nothing: the next ``propose`` reads what was committed."""

    def join(self, state: HostState[PredictionReader], other: HostState[PredictionReader]) -> None:
        state.join(other)
