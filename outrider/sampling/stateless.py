"""Checks whether a user's logits processor can be used with drafts, i.e. keeps no state.

Speculative decoding calls a processor for every drafted position: many in one round, some several
times, and some whose token is never emitted. Its result must therefore be a function of its
arguments. If a processor remembered its calls, rejected drafts would influence the output.

Legend: V vocabulary.
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

_MAX_VALUES = 100_000


def check_stateless(
    processor: Processor,
    number: int,
    ids: Sequence[int],
    num_tokens: int,
    ends: Collection[int],
    device: torch.device,
) -> None:
    """Calls a processor three times each for a prompt and for the prompt with one more token.

    Args:
        processor: the processor.
        number: its index among the request's processors.
        ids: the prompt.
        num_tokens: size of the vocabulary.
        ends: end tokens; processors are not called after them.
        device: the device of the logits.

    Raises:
        InvalidParameterError: the processor returned different scores for the same arguments, or
            its attributes change with every call.
    """
    flat_1V = torch.linspace(0.0, -1.0, num_tokens, device=device)[None]

    def call(tokens: Sequence[int]) -> Tensor:
        return processor(torch.tensor([list(tokens)], device=device), flat_1V.clone()).clone()

    prefixes = [list(ids)]
    scores = [call(ids)]
    token = int(scores[0].argmax())
    if token not in ends and bool(scores[0].amax().isfinite()):
        prefixes.append([*ids, token])
        scores.append(call(prefixes[1]))
    repeated = [call(tokens) for tokens in prefixes]
    before = _state(processor)
    repeated += [call(tokens) for tokens in prefixes]
    pairs = zip(scores * 2, repeated, strict=True)
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        problem = "returned different scores for the same input"
    elif before != _state(processor):
        problem = "changed its attributes at every call"
    else:
        return
    kind = getattr(processor, "__name__", type(processor).__name__)
    raise InvalidParameterError(
        f"processors[{number}] ({kind}) {problem}, so it seems to keep state, which drafted tokens "
        f"would corrupt: pass stateless=False to call it once per emitted token, in order, without "
        f"drafts; or stateless=True if its state, such as a counter, never changes its results"
    )


def _state(processor: Processor) -> object:
    """The visible state of an object, as plain values that can be compared."""
    return _Snapshot().of(processor)


class _Snapshot:
    """Visits each reachable object once, up to a maximum number of objects."""

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}

    def of(self, value: object) -> object:
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            return repr(value)
        if id(value) in self._seen or len(self._seen) >= _MAX_VALUES:
            return id(value)
        self._seen[id(value)] = value  # a reference, so that no other object gets the same id
        if isinstance(value, Tensor):
            return _digest(value)
        if callable(tobytes := getattr(value, "tobytes", None)):  # a numpy array
            return hashlib.sha256(tobytes()).hexdigest()
        if isinstance(value, type | types.ModuleType | nn.Module):
            return id(value)
        if isinstance(value, Mapping):
            return [(self.of(key), self.of(item)) for key, item in value.items()]
        if isinstance(value, AbstractSet):
            return sorted(map(repr, value))
        if isinstance(value, list | tuple | deque | bytearray):
            return [self.of(item) for item in value]
        return [type(value).__qualname__, *map(self.of, _parts(value))]


def _parts(value: object) -> list[object]:
    """The contents of an object of any other type."""
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
