"""Time is kept: parts have their share, what overruns is ended, some things do not count."""

import time

import pytest

from nano.gpu_check.deadline import Deadline, TimeUp


class Now:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_part_has_no_more_time_than_the_whole():
    now = Now()
    whole = Deadline(10.0, now)
    part = whole.child(60.0)
    assert part.left == 10.0
    now.seconds += 8.0
    assert part.has(2.0)
    assert not part.has(2.1)
    assert whole.child(1.0).left == 1.0


def test_what_is_outside_the_limit_takes_time_from_nobody():
    now = Now()
    whole = Deadline(10.0, now)
    part = whole.child(4.0)
    with part.outside():
        now.seconds += 1000.0
    assert part.left == 4.0
    assert whole.left == 10.0


def test_what_does_not_end_is_ended():
    with pytest.raises(TimeUp), Deadline(0.0).enforced(grace=0.05):
        time.sleep(60)


def test_the_end_does_not_come_outside_the_limit_but_after_it():
    part = Deadline(0.05)

    def overrun() -> None:
        with part.outside():
            time.sleep(0.2)
        assert part.left > 0
        time.sleep(60)

    with pytest.raises(TimeUp), part.enforced(grace=0.0):
        overrun()


def test_nothing_comes_after_a_block_that_has_ended_in_time():
    with Deadline(0.05).enforced(grace=0.0):
        pass
    time.sleep(0.1)
