"""Is it lossless, on your pair and with your settings? Measured, not believed.

Six checks, each seeing what others cannot:

    states     the target's cache after real rounds, against passes from scratch
    positions  the emitted law at single places of real rounds, in closed form
    rounds     whole rounds, enumerated, on laws of the pair and on toys
    drafts     drafted tokens, counted against the laws that the drafter declares
    tokens     emitted tokens, counted against the target's law from scratch
    texts      continuations against plain decoding, a two-sample test

At temperature 0 the last four give way to one: every token is the target's argmax.
"""

from outrider.bench.certify.report import Certificate, Check
from outrider.bench.certify.run import certify

__all__ = ["Certificate", "Check", "certify"]
