"""Every error that a user can cause, each with its own type and a one-line message that names the
remedy."""

from typing import Any


class OutriderError(Exception):
    """Base class of all errors that Outrider raises; the command line prints them on one line.

    Attributes:
        results: where ``Engine.generate`` raises the error of one prompt, a result per prompt of
            the call, None for each that failed. Empty elsewhere.
    """

    results: tuple[Any, ...] = ()


class InvalidParameterError(OutriderError, ValueError):
    """A parameter lies outside its domain."""


class IncompatibleError(OutriderError, ValueError):
    """Two parts cannot work together: a drafter and a verifier, or a draft model and a target."""


class VocabularyMismatchError(IncompatibleError):
    """Draft and target do not share a vocabulary."""


class UnknownMethodError(OutriderError, ValueError):
    """There is no method of that name."""


class ModelLoadError(OutriderError):
    """A model folder or model id cannot be loaded."""


class UnsupportedModelError(ModelLoadError):
    """The model's state cannot be rolled back, or its positions cannot be given explicitly."""


class PromptError(OutriderError, ValueError):
    """A prompt is empty, longer than the context, or has token ids out of range."""


class NonFiniteLogitsError(OutriderError, ArithmeticError):
    """A model produced NaN or infinite logits."""


class DeadEndError(OutriderError, ValueError):
    """A request's parameters leave no token to sample, or make a logit NaN or infinite."""


class OutOfMemoryError(OutriderError, MemoryError):
    """The KV cache does not fit into the available memory."""


class KernelError(OutriderError, RuntimeError):
    """Outrider's own kernels cannot be compiled or loaded on this machine."""


class RankError(OutriderError):
    """The processes of a sharded run cannot work together: too few of them, different versions or
    settings, or outputs that differ."""


class RankLostError(RankError):
    """A process of a sharded run has died, or does not answer."""


class OutriderWarning(UserWarning):
    """A request could not be met in full; the command line prints the warning as a note."""
