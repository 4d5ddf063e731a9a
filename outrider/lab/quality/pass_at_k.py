"""pass@k: the probability that one of k generated programs passes the tests of its task.

Chen et al., Evaluating Large Language Models Trained on Code, 2021. Of n programs per task c pass;
the estimator without bias is, by equation 1,

    pass@k = mean over tasks of 1 - C(n - c, k) / C(n, k)

Estimating it as 1 - (1 - c/n)^k is biased downwards. Tasks are those of HumanEval: a prompt that
begins a function, tests that define ``check``, and the function's name.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.core.errors import InvalidParameterError
from outrider.lab.sandbox import Limits, Outcome, run_program

LIMITS = Limits()
_FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|\Z)", re.DOTALL | re.IGNORECASE)
_STOPS = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n```")
"""What ends a completion, as in the paper: the function is over."""


@dataclass(frozen=True)
class Task:
    """A programming task.

    Attributes:
        prompt: the beginning of a function: its signature and docstring.
        tests: code that defines ``check(candidate)``.
        entry_point: the function's name.
    """

    prompt: str
    tests: str
    entry_point: str

    def program(self, output: str) -> str:
        """The program that tests an output.

        An output with a fenced block of Python that defines the function is an answer of a chat
        model, which repeats the function; any other continues the prompt, and is cut where the
        function is over.
        """
        defined = re.compile(rf"^def {re.escape(self.entry_point)}\b", re.MULTILINE)
        blocks = [block for block in _FENCED.findall(output) if defined.search(block)]
        if blocks:
            return f"{self.prompt}    pass\n\n{blocks[0]}\n{self._check}"
        return f"{self.prompt}{completion(output)}\n{self._check}"

    @property
    def _check(self) -> str:
        return f"\n{self.tests}\n\ncheck({self.entry_point})\n"


def completion(output: str) -> str:
    """What of an output belongs to the function that it completes."""
    ends = [at for stop in _STOPS if (at := output.find(stop)) >= 0]
    return output[: min(ends)] if ends else output


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate for one task.

    Args:
        num_samples: n, programs.
        num_correct: c, those that passed.
        k: at most n.

    Raises:
        InvalidParameterError: numbers out of range.
    """
    if not 0 <= num_correct <= num_samples or not 1 <= k <= num_samples:
        raise InvalidParameterError(
            f"pass@{k} of {num_correct} in {num_samples} programs: needs at least k programs per "
            "task; generate more outputs per prompt, or take a smaller k"
        )
    if num_samples - num_correct < k:
        return 1.0
    return 1 - math.prod(1 - k / n for n in range(num_samples - num_correct + 1, num_samples + 1))


def mean_pass_at_k(passed: Sequence[Sequence[bool]], k: int) -> float:
    """The mean over tasks, each with the verdicts on its programs; NaN without tasks."""
    return (
        statistics.fmean(pass_at_k(len(each), sum(each), k) for each in passed)
        if passed
        else math.nan
    )


def run_tests(
    samples: Sequence[tuple[Task, str]],
    limits: Limits = LIMITS,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Outcome]:
    """Runs each output with the tests of its task, one after another, in the sandbox.

    Args:
        samples: tasks and outputs.
        limits: of each program.
        progress: called after each program with the number of those done.
    """
    outcomes = []
    for task, output in samples:
        outcomes.append(run_program(task.program(output), limits))
        progress(len(outcomes))
    return outcomes
