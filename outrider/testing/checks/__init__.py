"""Contract: what every model, drafter and verifier promises, checked for any implementation.

Each check raises AssertionError with the broken promise in its message.
"""

from outrider.testing.checks.drafter import check_draft, check_drafter
from outrider.testing.checks.model import check_model
from outrider.testing.checks.verifier import check_verifier

__all__ = ["check_draft", "check_drafter", "check_model", "check_verifier"]
