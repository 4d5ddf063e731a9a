"""Simulates a fleet of replicas: random arrivals, a load that follows the day, failures.

Events of a replica are arrivals, ends of requests, failures and repairs. Between two of them its
batch is constant, so each of its n rows advances by r(n) tokens per second, the rate that the round
times of the plan, or measured ones, say. A replica counts the tokens v that a row which is there
all the time would have got; a request that began at v and has L tokens ends at v + L. So an event
costs the same whatever number of rounds lies between, and no round is simulated on its own.

Replicas meet only in the router. Time is cut into windows: at the start of each, its arrivals are
routed by the loads of that moment, as a router does whose knowledge is a little old. Within the
window, numpy advances every replica from event to event, all replicas at once.

Legend: R replicas, S rows of a replica, Q requests in its queue, I replicas of one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_at_least
from outrider.lab.plan.fleet import DAY, Fleet, Traffic
from outrider.lab.plan.simulated import Simulated

_END, _ARRIVAL, _FAILURE, _REPAIR, _WINDOW = range(5)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def simulate(
    fleet: Fleet,
    traffic: Traffic,
    seconds: float = DAY,
    seed: int = 0,
    warmup: float = 0.0,
    window: float = 1.0,
    progress: Callable[[float], None] = lambda seconds: None,
) -> Simulated:
    """Runs the fleet, which begins empty.

    Args:
        fleet: what serves.
        traffic: what is asked.
        seconds: simulated time after the warm-up.
        seed: of arrivals, lengths, routing and failures.
        warmup: simulated time before anything is counted.
        window: seconds between two moments at which the router sees the loads.
        progress: called with the simulated seconds so far, once per simulated hour.

    Raises:
        InvalidParameterError: a time that is not above 0.
    """
    for name, value in (("seconds", seconds), ("window", window)):
        if not (value > 0 and math.isfinite(value)):
            raise InvalidParameterError(f"{name}={value!r}: must be above 0")
    check_at_least("warmup", warmup, 0)
    return _Simulation(fleet, traffic, seed).run(seconds, warmup, window, progress)


class _Simulation:
    """The state of a fleet."""

    def __init__(self, fleet: Fleet, traffic: Traffic, seed: int) -> None:
        R, S, Q = fleet.replicas, len(fleet.row_rates), max(1, fleet.queue)
        self.fleet, self.traffic = fleet, traffic
        self.random = np.random.Generator(np.random.PCG64(seed))
        self.rates = np.array([0.0, *fleet.row_rates])  # by the number of rows
        self.rounds = np.array([0.0, *(fleet.round_seconds or np.zeros(S))])
        self.clock_R = np.zeros(R)
        self.stall_R = np.zeros(R)  # seconds of prefill before the rows advance again
        self.tokens_R = np.zeros(R)  # v
        self.rows_R = np.zeros(R, np.int64)
        self.goal_RS = np.full((R, S), np.inf)  # v at the end of each request
        self.next_R = np.full(R, np.inf)  # the lowest of them
        self.born_RS = np.zeros((R, S))
        self.prefilled_RS = np.zeros((R, S))  # when the prefill of each ended
        self.length_RS = np.zeros((R, S))
        self.waiting_R = np.zeros(R, np.int64)
        self.head_R = np.zeros(R, np.int64)
        self.queued_RQ = np.zeros((R, Q, 2))  # when it arrived, and its length
        self.failure_R = self._times_to_failure(R)
        self.repair_R = np.full(R, np.inf)  # infinite while it serves
        self.again: list[NDArray[np.float64]] = []  # requests that failures interrupted
        self.found = Simulated()

    def _times_to_failure(self, num: int) -> Floats:
        mean = self.fleet.mean_time_to_failure
        return self.random.exponential(mean, num) if math.isfinite(mean) else np.full(num, np.inf)

    # ------------------------------------------------------------------------------ time

    def run(
        self, seconds: float, warmup: float, window: float, progress: Callable[[float], None]
    ) -> Simulated:
        """The whole simulation; arguments as those of :func:`simulate`."""
        end, at = warmup + seconds, 0.0
        counted = warmup == 0
        hour = [0.0, 0, 0.0]  # seconds, arrivals, row seconds
        while at < end:
            until = min(at + window, end)
            if not counted:
                until = min(until, warmup)
            before = self.found.arrived, self.found.row_seconds
            self._window(at, until)
            hour[0] += until - at
            hour[1] += self.found.arrived - before[0]
            hour[2] += self.found.row_seconds - before[1]
            at = until
            if not counted and at >= warmup:
                self.found, counted, hour = Simulated(), True, [0.0, 0, 0.0]
            if counted and (hour[0] >= 3600 - window / 2 or at >= end):
                self.found.hours.append(
                    {
                        "load": hour[1] / hour[0],
                        "rows": hour[2] / hour[0] / self.fleet.replicas,
                    }
                )
                hour = [0.0, 0, 0.0]
                progress(at - warmup)
        self.found.seconds = seconds
        return self.found

    def _window(self, start: float, until: float) -> None:
        """Routes the arrivals of a window, and advances all replicas to its end."""
        when_N, replica_N, born_N, length_N = self._arrivals(start, until)
        bounds = np.searchsorted(replica_N, np.arange(self.fleet.replicas + 1))
        at_R, end_R = bounds[:-1].copy(), bounds[1:]
        when_N = np.append(when_N, np.inf)
        active_I = np.arange(self.fleet.replicas)
        while len(active_I):
            i = active_I
            arrival_I = np.where(at_R[i] < end_R[i], when_N[at_R[i]], np.inf)
            kind_I = self._advance(i, arrival_I, until)
            if len(r := i[kind_I == _ARRIVAL]):
                n = at_R[r]
                at_R[r] += 1
                self._arrive(r, born_N[n], length_N[n])
            if len(r := i[kind_I == _END]):
                self._finish(r)
            if len(r := i[kind_I == _FAILURE]):
                self._fail(r)
            if len(r := i[kind_I == _REPAIR]):
                self._repair(r)
            active_I = i[kind_I != _WINDOW]

    def _advance(self, i: Ints, arrival_I: Floats, until: float) -> Ints:
        """Moves each replica to its next event, or to the end of the window; what event it is."""
        clock_I, stall_I, rows_I = self.clock_R[i], self.stall_R[i], self.rows_R[i]
        rate_I = self.rates[rows_I]
        left_I = self.next_R[i] - self.tokens_R[i]
        end_I = np.full(len(i), np.inf)
        running_I = rows_I > 0
        end_I[running_I] = (clock_I + stall_I)[running_I] + np.maximum(
            0.0, left_I[running_I] / rate_I[running_I]
        )
        times_KI = np.stack(
            (end_I, arrival_I, self.failure_R[i], self.repair_R[i], np.full(len(i), until))
        )
        kind_I = times_KI.argmin(0)
        now_I = times_KI[kind_I, np.arange(len(i))]
        passed_I = now_I - clock_I
        stalled_I = np.minimum(stall_I, passed_I)
        self.stall_R[i] = stall_I - stalled_I
        self.tokens_R[i] += rate_I * (passed_I - stalled_I)
        self.clock_R[i] = now_I
        found = self.found
        found.row_seconds += float(passed_I @ rows_I)
        found.waiting_seconds += float(passed_I @ self.waiting_R[i])
        found.busy_seconds += float(passed_I @ running_I)
        return kind_I

    # ---------------------------------------------------------------------------- events

    def _arrivals(self, start: float, until: float) -> tuple[Floats, Ints, Floats, Floats]:
        """Times, replicas, original times and lengths of a window's arrivals, by replica and time;
        those that failures interrupted arrive at its start."""
        seconds = until - start
        num = int(self.random.poisson(self.traffic.at((start + until) / 2) * seconds))
        born_N = start + seconds * self.random.random(num)
        mean = self.traffic.output_tokens
        if self.traffic.lengths == "constant":
            length_N = np.full(num, mean)
        else:
            length_N = self.random.exponential(mean, num)
        self.found.arrived += num
        when_N = born_N
        if self.again:
            again_M2 = np.concatenate(self.again)
            self.again = []
            when_N = np.append(when_N, np.full(len(again_M2), start))
            born_N = np.append(born_N, again_M2[:, 0])
            length_N = np.append(length_N, again_M2[:, 1])
        serving = np.flatnonzero(np.isinf(self.repair_R))
        if not len(serving):
            self.again.append(np.stack((born_N, length_N), 1))
            empty = np.zeros(0)
            return empty, np.zeros(0, np.int64), empty, empty
        replica_N = self._route(serving, len(when_N))
        order = np.lexsort((when_N, replica_N))
        return when_N[order], replica_N[order], born_N[order], length_N[order]

    def _route(self, serving: Ints, num: int) -> Ints:
        first_N = serving[self.random.integers(len(serving), size=num)]
        if self.fleet.routing == "random":
            return first_N
        second_N = serving[self.random.integers(len(serving), size=num)]
        load_R = self.rows_R + self.waiting_R
        return np.where(load_R[second_N] < load_R[first_N], second_N, first_N)

    def _arrive(self, r: Ints, born_I: Floats, length_I: Floats) -> None:
        """A request at each replica: it runs, waits, is rejected, or goes elsewhere."""
        down_I = np.isfinite(self.repair_R[r])
        if down_I.any():
            self.again.append(np.stack((born_I[down_I], length_I[down_I]), 1))
        free_I = ~down_I & (self.rows_R[r] < self.goal_RS.shape[1])
        self._start(r[free_I], born_I[free_I], length_I[free_I])
        room_I = ~down_I & ~free_I & (self.waiting_R[r] < self.fleet.queue)
        self.found.rejected += int((~down_I & ~free_I & ~room_I).sum())
        w = r[room_I]
        tail = (self.head_R[w] + self.waiting_R[w]) % self.queued_RQ.shape[1]
        self.queued_RQ[w, tail, 0] = born_I[room_I]
        self.queued_RQ[w, tail, 1] = length_I[room_I]
        self.waiting_R[w] += 1

    def _start(self, r: Ints, born_I: Floats, length_I: Floats) -> None:
        """Gives a request a free row at each replica."""
        if not len(r):
            return
        slot = np.isinf(self.goal_RS[r]).argmax(1)
        now_I = self.clock_R[r]
        self.found.wait.add(now_I - born_I)
        self.stall_R[r] += self.fleet.prefill_seconds
        self.rows_R[r] += 1
        goal_I = self.tokens_R[r] + length_I
        self.goal_RS[r, slot] = goal_I
        self.next_R[r] = np.minimum(self.next_R[r], goal_I)
        self.born_RS[r, slot], self.length_RS[r, slot] = born_I, length_I
        prefilled_I = now_I + self.stall_R[r]
        self.prefilled_RS[r, slot] = prefilled_I
        self.found.first_token.add(prefilled_I + self.rounds[self.rows_R[r]] - born_I)

    def _finish(self, r: Ints) -> None:
        """Ends the request with the lowest goal at each replica, and starts the next."""
        slot = self.goal_RS[r].argmin(1)
        now_I, length_I = self.clock_R[r], self.length_RS[r, slot]
        self.tokens_R[r] = self.next_R[r]  # without the rounding of the clock
        self.found.finished += len(r)
        self.found.tokens += float(length_I.sum())
        self.found.request.add(now_I - self.born_RS[r, slot])
        decoding_I = np.maximum(0.0, now_I - self.prefilled_RS[r, slot])
        self.found.per_token.add(decoding_I / length_I)
        self.goal_RS[r, slot] = np.inf
        self.rows_R[r] -= 1
        self.next_R[r] = self.goal_RS[r].min(1)
        w = r[self.waiting_R[r] > 0]
        if len(w):
            born_I, length_I = self.queued_RQ[w, self.head_R[w]].T
            self.head_R[w] = (self.head_R[w] + 1) % self.queued_RQ.shape[1]
            self.waiting_R[w] -= 1
            self._start(w, born_I.copy(), length_I.copy())

    def _fail(self, r: Ints) -> None:
        """Interrupts all requests of each replica; they arrive again at another one."""
        self.found.failures += len(r)
        for replica in r:
            running_S = np.isfinite(self.goal_RS[replica])
            lost = np.stack((self.born_RS[replica], self.length_RS[replica]), 1)[running_S]
            indexes = self.head_R[replica] + np.arange(self.waiting_R[replica])
            queued = self.queued_RQ[replica, indexes % self.queued_RQ.shape[1]]
            self.again += [lost, queued]
            self.found.restarted += len(lost) + len(queued)
        self.goal_RS[r], self.next_R[r] = np.inf, np.inf
        self.rows_R[r], self.waiting_R[r], self.stall_R[r] = 0, 0, 0.0
        self.failure_R[r] = np.inf
        self.repair_R[r] = self.clock_R[r] + self.fleet.repair_seconds

    def _repair(self, r: Ints) -> None:
        self.repair_R[r] = np.inf
        self.failure_R[r] = self.clock_R[r] + self._times_to_failure(len(r))
