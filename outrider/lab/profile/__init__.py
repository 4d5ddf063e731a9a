"""Where the time of a round goes, and what it could be on this machine.

spans, instrument   an engine timed from outside
phases              a round's time by what it was spent on
bandwidth, floor    what memory delivers, what a pass must read of it
beta                a pass over n tokens against one over a single token
formula             the speed-up that follows, and the one that was measured
trace, plot         the same rounds as a Chrome trace, the β curve as a picture
"""

from outrider.lab.profile.plot import draw
from outrider.lab.profile.run import Profile, profile
from outrider.lab.profile.trace import trace_events, write_trace

__all__ = ["Profile", "draw", "profile", "trace_events", "write_trace"]
