"""Splits an answer into its text and its calls of functions, as it arrives."""

import uuid
from collections.abc import Collection
from dataclasses import dataclass, field

from outrider.engine.special_stops import overlap
from outrider.serve.tools.formats import CallFormat
from outrider.serve.tools.json_call import JsonCall

_BETWEEN = " \t\r\n,;[]"
"""What stands between two calls."""


@dataclass
class Call:
    """A call of a function.

    Attributes:
        index: its number in the answer.
        name: the function.
        arguments: JSON, as the model wrote it.
        id: how the client names it in its next request.
    """

    index: int
    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


@dataclass(frozen=True)
class CallDelta:
    """What was added to a call.

    Attributes:
        call: the call so far.
        arguments: the new part of its arguments.
        begins: whether the call is new.
    """

    call: Call
    arguments: str
    begins: bool


Delta = str | CallDelta


class Reply:
    """An answer as far as it came.

    What may turn out to be a call is held back until it is certain. What is no call after all is
    text. The deltas add up to ``text`` and ``calls``.

    Args:
        format: how the model writes calls; None for an answer that is text, whatever it says.
        names: the functions that it may call.
        parallel: whether it may have more than one call; later ones are dropped.

    Attributes:
        text: the answer without its calls.
        calls: its calls.
    """

    def __init__(
        self, format: CallFormat | None = None, names: Collection[str] = (), parallel: bool = True
    ) -> None:
        self.text = ""
        self.calls: list[Call] = []
        self._format = format
        self._names = names
        self._parallel = parallel
        self._unread = ""
        self._in_calls = False
        self._held = ""  # marks and spaces before what may be a call
        self._after_call = False
        self._object: JsonCall | None = None
        self._call: Call | None = None

    def take(self, text: str, *, over: bool) -> list[Delta]:
        """Reads more of the answer.

        Args:
            text: the new text.
            over: whether it is the last.
        """
        if self._format is None:
            self.text += text
            return [text] if text else []
        self._unread += text
        found: list[Delta] = []
        while self._advance(self._format, over, found):
            pass
        if over:
            self._finish(found)
        return _joined(found)

    def _advance(self, format: CallFormat, over: bool, found: list[Delta]) -> bool:
        """Reads on as far as one step goes; whether another step may go further."""
        if self._object is not None:
            return self._read_object(self._object, found)
        if self._in_calls:
            return self._read_between(format, found)
        if self._begins_bare(format):
            self._in_calls = True
            return True
        at = self._unread.find(format.begin) if format.begin else -1
        if at >= 0:
            self._say(self._unread[:at], found)
            self._held = format.begin
            self._unread, self._in_calls = self._unread[at + len(format.begin) :], True
            return True
        certain = len(self._unread)
        if not over:
            if self._is_undecided(format):
                return False
            certain -= overlap(self._unread, format.begin)
        self._say(self._unread[:certain], found)
        self._unread = self._unread[certain:]
        return False

    def _begins_bare(self, format: CallFormat) -> bool:
        """Whether the answer begins with a call without a mark: the format has none, or its mark is
        a special token, which is not part of the text."""
        start = self._unread.lstrip()
        if not self._may_be_bare(format) or start[:1] not in ("{", "["):
            return False
        shared = min(len(start), len(format.begin))
        return not shared or start[:shared] != format.begin[:shared]

    def _may_be_bare(self, format: CallFormat) -> bool:
        """Whether a call without a mark could stand here: at the beginning."""
        return not (format.repeats or self.text or self.calls)

    def _is_undecided(self, format: CallFormat) -> bool:
        """Whether the answer may still turn out to begin with a call."""
        start = self._unread.lstrip()
        return self._may_be_bare(format) and (not start or format.begin.startswith(start))

    def _read_between(self, format: CallFormat, found: list[Delta]) -> bool:
        """Reads marks and spaces up to the next call."""
        rest = self._unread.lstrip(_BETWEEN)
        self._held += self._unread[: len(self._unread) - len(rest)]
        self._unread = rest
        if not rest:
            return False
        if rest[0] == "{":
            self._object = JsonCall()
            return True
        if format.end and rest.startswith(format.end):
            self._unread, self._held = rest[len(format.end) :], ""
            self._in_calls = False
            return True
        if format.end and format.end.startswith(rest):
            return False
        self._give_up(found)
        return True

    def _read_object(self, read: JsonCall, found: list[Delta]) -> bool:
        for at, character in enumerate(self._unread, 1):
            read.push(character)
            if read.is_known and self._call is None and not self._may_call(read.name):
                read.is_wrong = True
            if read.is_over or read.is_wrong:
                self._unread = self._unread[at:]
                self._end_object(read, found)
                return True
        self._unread = ""
        self._tell(read, found)
        return False

    def _may_call(self, name: str | None) -> bool:
        """Whether an object with a name is a call: between marks it is, without marks only if there
        is such a function."""
        assert self._format is not None
        return self._format.repeats or name in self._names

    def _end_object(self, read: JsonCall, found: list[Delta]) -> None:
        if not read.is_wrong:
            self._tell(read, found)
        self._object = None
        if read.is_wrong and self._call is None:
            self._held += read.raw
            self._give_up(found)
        else:
            self._after_call = True
        self._call, self._held = None, ""

    def _tell(self, read: JsonCall, found: list[Delta]) -> None:
        """Notes what is new of a call."""
        if not read.is_known or self._drops_calls:
            return
        begins = self._call is None
        if self._call is None:
            self._call = Call(len(self.calls), str(read.name))
            self.calls.append(self._call)
        new = read.arguments[len(self._call.arguments) :]
        self._call.arguments += new
        if new or begins:
            found.append(CallDelta(self._call, new, begins))

    @property
    def _drops_calls(self) -> bool:
        """Whether the answer has the one call that it may have, and no call is being read."""
        return bool(self.calls) and not self._parallel and self._call is None

    def _give_up(self, found: list[Delta]) -> None:
        """What was held back is text."""
        self._say(self._held, found)
        self._held, self._in_calls = "", False

    def _finish(self, found: list[Delta]) -> None:
        read = self._object
        is_cut = read is not None and self._call is None and not self._drops_calls
        if read is not None and is_cut:
            self._held += read.raw
        if not self.calls or is_cut:
            self._say(self._held, found)
        self._say(self._unread, found)
        self._held = self._unread = ""

    def _say(self, text: str, found: list[Delta]) -> None:
        """Adds text; spaces after a call are none."""
        if self._after_call:
            text = text.lstrip()
        if not text:
            return
        self._after_call = False
        self.text += text
        found.append(text)


def _joined(deltas: list[Delta]) -> list[Delta]:
    """The same with neighbouring texts as one."""
    joined: list[Delta] = []
    for each in deltas:
        if isinstance(each, str) and joined and isinstance(joined[-1], str):
            joined[-1] += each
        else:
            joined.append(each)
    return joined
