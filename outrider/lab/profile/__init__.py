"""Profiles: where the time of a round goes, and how fast it could be on this machine.

spans, instrument   time spans of an engine, recorded from outside
phases              the time of a round by what it was spent on
bandwidth, floor    memory bandwidth, and the least time that a forward pass can take
beta                the time of a pass over n tokens against one over a single token
formula             the speed-up that theory predicts beside the measured one
trace, plot         the recorded rounds as a Chrome trace; the β curve as a figure
"""

from outrider.lab.profile.plot import draw
from outrider.lab.profile.run import Profile, profile
from outrider.lab.profile.trace import trace_events, write_trace

__all__ = ["Profile", "draw", "profile", "trace_events", "write_trace"]
