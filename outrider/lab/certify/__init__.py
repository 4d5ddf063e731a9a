"""Certificates: measures whether a method is lossless on the user's own models and settings.

Six checks, each of which finds mistakes that the others miss:

    states     the target's KV cache after real rounds, against forward passes from scratch
    positions  the emitted distribution at single positions of real rounds, in closed form
    rounds     whole rounds by enumeration, on toy models and on distributions of the pair
    drafts     drafted tokens, counted against the distributions that the drafter declares
    tokens     emitted tokens, counted against the target's distribution from scratch
    outputs    continuations by the method against plain decoding, a two-sample test

At temperature 0, one check replaces all but states and rounds: every emitted token must be the
target's argmax.
"""

from outrider.lab.certify.report import Certificate, Check
from outrider.lab.certify.run import certify

__all__ = ["Certificate", "Check", "certify"]
