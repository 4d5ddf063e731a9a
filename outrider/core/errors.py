"""Every error a user can cause: a type of its own, and one line that names the remedy."""

from typing import Any


class OutriderError(Exception):
    """Base of all errors raised on purpose; the command line prints them on one line.

    Attributes:
        results: where ``Engine.generate`` raises the error of one prompt, a result per prompt of
            the call, None for each that failed. Empty elsewhere.
    """

    results: tuple[Any, ...] = ()


class InvalidParameterError(OutriderError, ValueError):
    """A parameter lies outside its domain."""


class IncompatibleError(OutriderError, ValueError):
    """Two parts that cannot work together: a drafter and a verifier, a draft and a target."""


class VocabularyMismatchError(IncompatibleError):
    """Draft and target do not share a vocabulary."""


class UnknownMethodError(OutriderError, ValueError):
    """No method of that name."""


class ModelLoadError(OutriderError):
    """A model folder or id that cannot be loaded."""


class UnsupportedModelError(ModelLoadError):
    """A model whose state cannot be rolled back, or whose positions cannot be given explicitly."""


class PromptError(OutriderError, ValueError):
    """An empty prompt, one longer than the context, or token ids out of range."""


class NonFiniteLogitsError(OutriderError, ArithmeticError):
    """A model produced NaN or infinite logits."""


class DeadEndError(OutriderError, ValueError):
    """A request's parameters leave no token to sample, or make a logit NaN or infinite."""


class OutOfMemoryError(OutriderError, MemoryError):
    """The KV buffers do not fit into the memory at hand."""


class KernelError(OutriderError, RuntimeError):
    """The project's own kernels cannot be compiled or loaded here."""


class OutriderWarning(UserWarning):
    """Something that was asked for could not be had in full; the command line prints a note."""
