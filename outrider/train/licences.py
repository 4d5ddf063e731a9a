"""Selects the installed distributions that may enter a corpus: the permissively licensed ones.

A licence is read from the SPDX `License-Expression` field (PEP 639), from the trove classifiers, or
from the free-text `License` field, in this order.  A package without a licence, or whose licence is
not known to be permissive, raises an error.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

PERMISSIVE_SPDX = frozenset(
    """0BSD Apache-2.0 BSD-2-Clause BSD-3-Clause BSL-1.0 CC0-1.0 CNRI-Python HPND ISC
    LLVM-exception MIT MIT-0 MIT-CMU PSF-2.0 Python-2.0 Unlicense Zlib""".split()
)
PERMISSIVE_CLASSIFIERS = frozenset(
    {
        "Apache Software License",
        "BSD License",
        "ISC License (ISCL)",
        "MIT License",
        "Python Software Foundation License",
        "The Unlicense (Unlicense)",
        "zlib/libpng License",
    }
)
_PERMISSIVE_TEXT = re.compile(r"\b(MIT|BSD|Apache|ISC|PSF)\b", re.IGNORECASE)
_RESTRICTIVE_TEXT = re.compile(r"GPL|MPL|Mozilla|proprietary|commercial", re.IGNORECASE)


class LicenceError(ValueError):
    """A package whose licence is missing, unknown or not permissive."""


def is_permissive_expression(expression: str) -> bool:
    """Whether an SPDX expression grants permissive use: one operand of OR, every operand of AND.

    In an expression with parentheses, each OR is treated as an AND, which is stricter.
    """
    if "(" in expression:
        names = re.split(r"\s+(?:AND|OR|WITH)\s+|[()]", expression)
        return all(name.strip() in PERMISSIVE_SPDX for name in names if name.strip())
    return any(
        all(name.strip() in PERMISSIVE_SPDX for name in re.split(r"\s+(?:AND|WITH)\s+", side))
        for side in re.split(r"\s+OR\s+", expression)
    )


def permissive_licence(distribution: metadata.Distribution) -> str:
    """Return the licence of a distribution.

    Raises:
        LicenceError: it declares no licence, or one that is not known to be permissive.
    """
    fields: Any = distribution.metadata  # an email.message.Message
    name = fields["Name"]
    message = f"package {name!r} cannot be used: {{}}; remove it from the list of packages"
    if expression := fields.get("License-Expression"):
        if is_permissive_expression(expression):
            return expression
        raise LicenceError(message.format(f"its licence {expression!r} is not permissive"))
    classifiers = [
        line.rsplit(" :: ", 1)[1]
        for line in fields.get_all("Classifier") or []
        if line.startswith("License :: ") and not line.endswith("OSI Approved")
    ]
    if classifiers:
        if all(classifier in PERMISSIVE_CLASSIFIERS for classifier in classifiers):
            return " and ".join(classifiers)
        raise LicenceError(message.format(f"its licence {classifiers[0]!r} is not permissive"))
    text = " ".join((fields.get("License") or "").split())
    if not text:
        raise LicenceError(message.format("it declares no licence"))
    if _PERMISSIVE_TEXT.search(text) and not _RESTRICTIVE_TEXT.search(text):
        return text[:60]
    raise LicenceError(message.format(f"its licence {text[:60]!r} is not known to be permissive"))
