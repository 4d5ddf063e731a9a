"""Sampling parameters and request numbers as users pass them to a call: one for all, or a list."""

from collections.abc import Iterable, Mapping
from typing import Any

from outrider.core.errors import InvalidParameterError
from outrider.core.values import as_python, is_whole, shown
from outrider.sampling import Sampling


def read_samplings(sampling: object, num_prompts: int) -> list[Sampling]:
    """Sampling parameters per prompt, from one for all or one for each.

    Raises:
        InvalidParameterError: what is no :class:`Sampling`, or another number of them.
    """
    sampling = as_python(sampling)
    if sampling is None or isinstance(sampling, Sampling | str | Mapping):
        return [read_sampling(sampling)] * num_prompts
    if not isinstance(sampling, Iterable):
        raise _no_sampling(sampling)
    samplings = [read_sampling(each) for each in sampling]
    if len(samplings) != num_prompts:
        raise InvalidParameterError(
            f"{len(samplings)} sampling parameters for {num_prompts} prompts: give one for all, or "
            f"one for each"
        )
    return samplings


def read_sampling(sampling: object) -> Sampling:
    """One request's sampling parameters; None takes the defaults.

    Raises:
        InvalidParameterError: what is no :class:`Sampling`.
    """
    if sampling is None:
        return Sampling()
    if not isinstance(sampling, Sampling):
        raise _no_sampling(sampling)
    return sampling


def read_numbers(numbers: object, num_prompts: int) -> list[int] | None:
    """Request numbers, one per prompt, from the numbers or, for one prompt, the number alone; None
    where they are to be derived.

    Raises:
        InvalidParameterError: what is no number from 0 to 2⁶⁴ - 1, or another number of them.
    """
    numbers = as_python(numbers)
    if numbers is None:
        return None
    given = list(numbers) if isinstance(numbers, Iterable) else [numbers]
    listed: list[Any] = [as_python(number) for number in given]
    bad = [number for number in listed if not is_whole(number) or not 0 <= number < 2**64]
    if bad:
        raise InvalidParameterError(
            f"request_numbers={shown(bad[0])}: must be whole numbers from 0 to 2**64 - 1"
        )
    if len(listed) != num_prompts:
        raise InvalidParameterError(
            f"{len(listed)} request numbers for {num_prompts} prompts: give one for each"
        )
    return listed


def _no_sampling(value: object) -> InvalidParameterError:
    example = "temperature=0.8, max_new_tokens=64"
    if isinstance(value, Mapping) and value:
        example = ", ".join(f"{name}={each!r}" for name, each in value.items())
    return InvalidParameterError(
        f"sampling={shown(value)}: must be outrider.Sampling; write Sampling({example})"
    )
