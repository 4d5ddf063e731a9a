"""A conversation with a model: its turns, what fits into the context, and what it has cost."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from outrider.cli.follow import follow

if TYPE_CHECKING:
    from outrider.engine import Engine, Event, Result
    from outrider.engine.chat import Message
    from outrider.sampling import Sampling

_QUARTER = 4


class Turn(NamedTuple):
    """A message and its answer."""

    message: str
    answer: str


@dataclass
class Conversation:
    """The turns so far, of which the newest that fit into the context are sent with each message.

    Attributes:
        engine: answers.
        sampling: the parameters of all answers.
        system: the system prompt; None leaves it to the model's template.
        turns: message and answer of each turn since the last :meth:`reset`, oldest first, without
            those that :meth:`make_room` dropped.
        results: the results of all turns, whatever was reset or dropped.
    """

    engine: "Engine"
    sampling: "Sampling"
    system: str | None = None
    turns: list[Turn] = field(default_factory=list)
    results: "list[Result]" = field(default_factory=list)

    def reset(self) -> None:
        """Forgets the turns."""
        self.turns.clear()

    def messages(self, message: str) -> "list[Message]":
        """The system prompt, the turns so far and one more message."""
        chat: list[Message] = []
        if self.system is not None:
            chat.append({"role": "system", "content": self.system})
        for turn in self.turns:
            chat.append({"role": "user", "content": turn.message})
            chat.append({"role": "assistant", "content": turn.answer})
        return [*chat, {"role": "user", "content": message}]

    def make_room(self, message: str) -> int:
        """Drops the oldest turns if message and answer do not fit into the context; how many.

        The answer is left ``max_new_tokens``, or a quarter of the context if that is less. Turns
        are dropped until another quarter is free: every time that the oldest turn changes, the
        whole conversation has to be read anew. A message that does not fit alone is left to the
        engine to refuse.

        Raises:
            PromptError: the model's template refuses the conversation.
        """
        quarter, num_before = self.engine.limit // _QUARTER, len(self.turns)
        room = self.engine.limit - min(self.sampling.max_new_tokens, quarter)
        if self._num_tokens(message) > room:
            while self.turns and self._num_tokens(message) > room - quarter:
                del self.turns[0]
        return num_before - len(self.turns)

    def ask(self, message: str, show: "Callable[[Event], None]") -> "Result":
        """Answers a message, passing each event to ``show``. After Ctrl-C the answer is what was
        written until then.

        Raises:
            OutriderError: as the engine does; the turn then does not count.
            KeyboardInterrupt: Ctrl-C before anything was written; likewise.
        """
        result = follow(self.engine, self.messages(message), self.sampling, show)
        self.turns.append(Turn(message, result.text))
        self.results.append(result)
        return result

    def _num_tokens(self, message: str) -> int:
        from outrider.engine.chat import encode_messages

        target = self.engine.target
        return len(encode_messages(target.tokenizer, self.messages(message), target.name))
