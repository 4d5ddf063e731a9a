"""pass@k: the estimator by enumeration, and programs of HumanEval's form in the sandbox."""

import math
from itertools import combinations

import pytest

from outrider.core.errors import InvalidParameterError
from outrider.lab.quality.pass_at_k import (
    Task,
    completion,
    mean_pass_at_k,
    pass_at_k,
    run_tests,
)
from outrider.lab.sandbox import Limits

TASK = Task(
    'import math\n\n\ndef area(r: float) -> float:\n    """The area of a circle."""\n',
    "def check(candidate):\n    assert abs(candidate(2) - 4 * math.pi) < 1e-9\n",
    "area",
)
RIGHT = "    return math.pi * r * r\n"


@pytest.mark.parametrize("num_samples", [1, 3, 6])
def test_the_estimator_is_the_share_of_subsets_with_a_correct_program(num_samples: int) -> None:
    """Over all subsets of size k; 1 - (1 - c/n)^k would be lower."""
    for num_correct in range(num_samples + 1):
        programs = [index < num_correct for index in range(num_samples)]
        for k in range(1, num_samples + 1):
            subsets = list(combinations(programs, k))
            expected = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected)


def test_large_numbers_do_not_overflow() -> None:
    assert pass_at_k(2000, 1, 100) == pytest.approx(0.05)


def test_the_mean_is_over_tasks() -> None:
    assert mean_pass_at_k([[True, False], [False, False, False, False]], 1) == pytest.approx(0.25)
    assert math.isnan(mean_pass_at_k([], 1))


@pytest.mark.parametrize(("num", "correct", "k"), [(3, 1, 4), (3, 4, 1), (3, 1, 0), (0, 0, 1)])
def test_bad_numbers(num: int, correct: int, k: int) -> None:
    with pytest.raises(InvalidParameterError, match="programs"):
        pass_at_k(num, correct, k)


def test_a_completion_ends_with_its_function() -> None:
    assert completion("    return 1\n\ndef other():\n    pass") == "    return 1\n"
    assert completion("    return 1\nprint(f(2))") == "    return 1"
    assert completion("    if x:\n        return 1") == "    if x:\n        return 1"


def test_programs_are_tested() -> None:
    outputs = {
        RIGHT: True,
        "    return 4 * math.pi\n\nprint(undefined)": True,
        "    return r\n": False,
        "    return math.pi * r *\n": False,
        "    import sys; sys.exit(0)\n": False,
        "    while True: pass\n": False,
        "Here it is:\n```python\nimport math\ndef area(r):\n    return math.pi * r**2\n```": True,
        "```python\ndef area(r):\n    return 0\n```\nDone.": False,
        "```python\ndef area(r):\n    return math.pi * r**2": True,  # cut off at the length limit
        f"{RIGHT}```\nExplanation": True,
    }
    samples = [(TASK, output) for output in outputs]
    done: list[int] = []
    found = run_tests(samples, Limits(wall_seconds=60, cpu_seconds=1), done.append)
    assert [outcome.passed for outcome in found] == list(outputs.values())
    assert done == list(range(1, len(outputs) + 1))
    assert found[5].ending == "time"
