"""Reports every error as one line on stderr with an exit code; OUTRIDER_DEBUG=1 adds stack traces.

Exit codes: 0 success; 1 a comparison failed, or a bug in Outrider; 2 bad input; 130 Ctrl-C.
"""

import errno
import os
import re
import sys
import traceback

import typer

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
DEBUG = "OUTRIDER_DEBUG"

_FLAGS = re.compile(  # how errors of the Python API name the parameters that are options here
    r"\b(temperature|top_k|top_p|min_p|repetition_penalty|presence_penalty|frequency_penalty"
    r"|logit_bias|seed|max_new_tokens|logprobs|stop|num_speculative_tokens|draft_confidence"
    r"|minutes|metric|at_least|references|repeats|tensor_parallel|draft_placement|max_repeats"
    r"|warmup|threads|alpha|cost|gammas"
    r"|divergence|data|beta|cost_ratio|answer_tokens|refresh_every|refresh_prompts|replay_samples"
    r"|draft_length|quantize_draft|quantize_target|kv_dtype|max_memory|prefix_cache|max_body_size|compile|exact"
    r"|load|gpus|gpu|passes|max_per_token|prompt_tokens|output_tokens|swing"
    r"|trust_remote_code|dtype|device|draft|target|method)=(?:'([^']*)'|\"([^\"]*)\"|(\.\.\.)|([^\s,;:]+))"
)
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""What a disk that is full, or that must not be written, answers; commands write much."""

_ONE_EACH = {"gammas": "gamma"}
"""Options that are given once for each value of a parameter."""


class BadInputError(ValueError):
    """Bad input that the command line itself finds, such as an unreadable file."""


def fail(message: str) -> BadInputError:
    """The error to raise for bad input."""
    return BadInputError(message)


def say(message: str) -> None:
    """Prints one line on stderr; line breaks in the message become spaces."""
    typer.echo(" ".join(message.split()), err=True)


def debugging() -> bool:
    """Whether the user asked for stack traces."""
    return os.environ.get(DEBUG, "") not in ("", "0")


def report(error: Exception) -> int:
    """Prints an error on one line and returns the exit code."""
    if debugging():
        traceback.print_exception(error)
    if isinstance(error, BadInputError):
        say(f"error: {error}")
        return BAD_INPUT
    if hasattr(error, "format_message"):  # a usage error of typer's
        context = getattr(error, "ctx", None)
        message = error.format_message().strip().rstrip(".")
        where = f" (help: {context.command_path} --help)" if context is not None else ""
        say(f"error: {message}{where}")
        return int(getattr(error, "exit_code", BAD_INPUT))
    if isinstance(error, typer.Abort):
        say("aborted")
        return FAILED
    known = sys.modules.get("outrider.core.errors")  # if not loaded, none of its errors was raised
    if known is not None and isinstance(error, known.OutriderError):
        say(f"error: {as_flags(str(error))}")
        return BAD_INPUT
    if isinstance(error, OSError) and error.errno in _REFUSED:
        file = "the output" if error.filename is None else f"'{error.filename}'"
        say(f"error: cannot write {file}: {error.strerror}")
        return BAD_INPUT
    say(
        f"error: unexpected {type(error).__name__}: {_first_line(error)} "
        f"({DEBUG}=1 shows where; please report it)"
    )
    return FAILED


def as_flags(message: str) -> str:
    """The message with Python parameters written as options: ``top_p=0`` as ``--top-p 0``."""

    def flag(match: re.Match[str]) -> str:
        name, single, double, dots, bare = match.groups()
        name = _ONE_EACH.get(name, name)
        if bare == "True":
            return f"--{name.replace('_', '-')}"
        value = "NAME" if dots else next(v for v in (single, double, bare) if v is not None)
        if not value or " " in value:
            value = repr(value)
        return f"--{name.replace('_', '-')} {value}"

    return _FLAGS.sub(flag, message)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
