"""Whether a user's logits processor may be asked about drafted tokens.

Speculative decoding asks a processor about every drafted position, most of them at once, some
several times, and some that never become text. So its answer must be a function of its arguments.
A processor that remembers its calls would steer the text by drafts that were rejected.

Legend: V vocabulary, T tokens.
"""

import functools
import hashlib
import types
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet

import torch
from torch import Tensor, nn

from outrider.core.errors import InvalidParameterError
from outrider.sampling.params import Processor

_MOST_VALUES = 100_000


def check_stateless(
    processor: Processor,
    number: int,
    ids: Sequence[int],
    num_tokens: int,
    ends: Collection[int],
    device: torch.device,
) -> None:
    """Asks a processor about a prompt, and about one token more, three times each.

    Args:
        processor: the processor.
        number: its place among the request's.
        ids: the prompt.
        num_tokens: size of the vocabulary.
        ends: tokens behind which the text ends, and nobody would ask it.
        device: where logits live.

    Raises:
        InvalidParameterError: it answered the same question in two ways, or its attributes went on
            changing.
    """
    flat_1V = torch.linspace(0.0, -1.0, num_tokens, device=device)[None]

    def ask(tokens: Sequence[int]) -> Tensor:
        return processor(torch.tensor([list(tokens)], device=device), flat_1V.clone()).clone()

    questions = [list(ids)]
    answers = [ask(ids)]
    token = int(answers[0].argmax())
    if token not in ends and bool(answers[0].amax().isfinite()):
        questions.append([*ids, token])
        answers.append(ask(questions[1]))
    again = [ask(tokens) for tokens in questions]
    before = _state(processor)
    again += [ask(tokens) for tokens in questions]
    pairs = zip(answers * 2, again, strict=True)
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        found = "answered the same input in two ways"
    elif before != _state(processor):
        found = "changed its attributes at every call"
    else:
        return
    kind = getattr(processor, "__name__", type(processor).__name__)
    raise InvalidParameterError(
        f"processors[{number}] ({kind}) {found}, so it seems to keep a state, which drafted tokens "
        f"would spoil: pass stateless=False to call it once per emitted token, in order, without "
        f"drafts; or stateless=True if what it keeps, such as a counter, never changes its answers"
    )


def _state(processor: Processor) -> object:
    """What can be seen of an object's state, as plain values that compare."""
    return _Reader().read(processor)


class _Reader:
    """Reads each object once; of very many values the first ones only."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}

    def read(self, value: object) -> object:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if id(value) in self._seen or len(self._seen) >= _MOST_VALUES:
            return id(value)
        self._seen[id(value)] = value  # kept, so that no other object gets its id
        if isinstance(value, Tensor):
            return _digest(value)
        if callable(tobytes := getattr(value, "tobytes", None)):  # an array of numpy's
            return hashlib.sha256(tobytes()).hexdigest()
        if isinstance(value, type | types.ModuleType | nn.Module):
            return id(value)
        if isinstance(value, Mapping):
            return [(self.read(key), self.read(item)) for key, item in value.items()]
        if isinstance(value, AbstractSet):
            return sorted(map(repr, value))
        if isinstance(value, list | tuple | deque | bytearray):
            return [self.read(item) for item in value]
        return [type(value).__qualname__, *map(self.read, _parts(value))]


def _parts(value: object) -> list[object]:
    """What an object of no known kind holds."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = value.__closure__ or ()
        return [*(_content(cell) for cell in cells), value.__defaults__, value.__dict__]
    slots = (name for kind in type(value).__mro__ for name in _names(kind))
    found = [getattr(value, name) for name in slots if hasattr(value, name)]
    return [*found, getattr(value, "__dict__", None)]


def _names(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    named = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in named if name not in ("__dict__", "__weakref__")]


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _digest(tensor: Tensor) -> object:
    data = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(data).hexdigest()
