"""Contract checks: what every model, drafter and verifier must guarantee.

Each check raises AssertionError with a message that names the violated guarantee.
"""

from outrider.testing.checks.drafter import check_draft, check_drafter
from outrider.testing.checks.model import check_model
from outrider.testing.checks.verifier import check_verifier

__all__ = ["check_draft", "check_drafter", "check_model", "check_verifier"]
