"""Errors of metrics that a user can cause."""

from outrider.core.errors import OutriderError


class MissingMetricPackageError(OutriderError, ImportError):
    """A metric needs a package that is not installed."""


class MissingReferenceError(OutriderError, ValueError):
    """A metric needs a reference answer that an example does not have."""
