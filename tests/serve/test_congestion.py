"""When a front end is behind, and that it lets nobody in then."""

from collections.abc import Callable

import pytest

from nano.engine.messages import EngineReady
from nano.serve.admission import Admission
from nano.serve.congestion import INTERVAL_SECONDS, Congestion
from nano.serve.http.errors import Refusal
from nano.serve.options import ServerOptions

TARGET = INTERVAL_SECONDS / 2
LONG = 1.2 * TARGET  # turns, of which three make an interval
SHORT = TARGET / 5


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Loop:
    """An event loop whose turns take as long as told. Callers come all the time."""

    def __init__(self, target: float):
        self.clock = Clock()
        self._notes: list[Callable[[], None]] = []
        self.congestion = Congestion(target, self.clock, self._notes.append)

    def turn(self, seconds: float) -> bool:
        """Whether the queue stands for who comes after a turn that long."""
        self.congestion.measure()
        self.congestion.measure()
        self.go_on(seconds)
        return self.congestion.is_standing

    def go_on(self, seconds: float) -> None:
        """To the next turn, which reads the one note that was left."""
        self.clock.now += seconds
        (note,) = self._notes
        self._notes.clear()
        note()


class TestCongestion:
    def test_a_queue_stands_once_no_turn_of_an_interval_was_short(self) -> None:
        loop = Loop(TARGET)
        assert [loop.turn(LONG) for _ in range(4)] == [False, False, True, True]
        assert not loop.turn(TARGET)
        assert [loop.turn(LONG) for _ in range(3)] == [False, False, True]

    def test_bursts_and_single_long_turns_are_no_congestion(self) -> None:
        loop = Loop(TARGET)
        assert not any(loop.turn(seconds) for seconds in (50 * LONG, SHORT, LONG, SHORT) * 5)

    def test_turns_longer_than_the_interval_do_not_hide_it(self) -> None:
        loop = Loop(TARGET)
        assert [loop.turn(7 * LONG) for _ in range(3)] == [False, True, True]
        loop.clock.now += 7 * LONG  # the caller is met late in the turn
        assert loop.congestion.is_standing

    def test_what_was_measured_long_ago_says_nothing(self) -> None:
        loop = Loop(TARGET)
        for _ in range(4):
            loop.turn(LONG)
        loop.clock.now += 10 * LONG  # nobody came
        assert not loop.congestion.is_standing
        assert not loop.turn(LONG)

    def test_under_overload_waits_stay_near_the_target_and_the_server_does_not_idle(self) -> None:
        """Calls cost 3 ms of the loop, refusals 0.3; three times what can be let in comes.
        There is room for 192.
        """
        loop, cost, refusal_cost, rate = Loop(0.05), 0.003, 0.0003, 1000.0
        num_let_in, backlog, waits = 0, 0.0, []
        for _ in range(3000):
            num_met, backlog = int(backlog), backlog % 1
            num_new = 0 if loop.congestion.is_standing else min(num_met, 192)
            num_let_in += num_new
            seconds = max(0.001, num_new * cost + (num_met - num_new) * refusal_cost)
            backlog += seconds * rate
            loop.turn(seconds)
            waits.append(seconds)
        spent = sum(waits)
        best = (1 - rate * refusal_cost) / (cost - refusal_cost)  # per second, of a busy loop
        assert num_let_in / spent > 0.7 * best
        assert sorted(waits)[int(0.99 * len(waits))] < 1.0

    def test_a_front_end_that_is_behind_lets_nobody_wait_but_fills_its_places(self) -> None:
        reasons: list[str] = []
        ready = EngineReady(1024, 100, 16, 512, "nano", max_num_requests=4)
        loop = Loop(TARGET)
        admission = Admission(
            ready,
            ServerOptions(max_waiting_requests=2),
            reasons.append,
            loop.clock,
            loop.congestion,
        )
        for _ in range(3):
            admission.meet()
            loop.go_on(LONG)
        arrivals = [admission.arrive() for _ in range(3)]
        admission.meet()  # one of the four places is left
        arrivals.append(admission.arrive())
        with pytest.raises(Refusal, match="try again in 1 s") as refusal:
            admission.meet()
        assert (refusal.value.status_code, refusal.value.code) == (429, "overloaded")
        assert reasons == ["front_end"]
        arrivals.append(admission.arrive())  # it was met before
        loop.go_on(SHORT)  # those who are turned away leave notes as well
        admission.meet()
