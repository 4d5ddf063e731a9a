"""Is it lossless, on your pair and with your settings? Measured, not believed.

Six checks, each seeing what others cannot:

    states     the target's cache after real rounds, against passes from scratch
    positions  the emitted distribution at single places of real rounds, in closed form
    rounds     whole rounds, enumerated, on distributions of the pair and on toys
    drafts     drafted tokens, counted against the distributions that the drafter declares
    tokens     emitted tokens, counted against the target's distribution from scratch
    texts      continuations against plain decoding, a two-sample test

At temperature 0 the last four give way to one: every token is the target's argmax.
"""

from outrider.lab.certify.report import Certificate, Check
from outrider.lab.certify.run import certify

__all__ = ["Certificate", "Check", "certify"]
