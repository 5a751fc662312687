"""When a process that ended is started again."""

from llmgw.core.restarts import Restarts


def test_each_end_within_a_minute_waits_longer_and_the_sixth_stays_down() -> None:
    restarts = Restarts()
    assert [restarts.ended(float(second)) for second in range(5)] == [0.1, 0.4, 1.6, 5.0, 5.0]
    assert not restarts.given_up
    assert restarts.ended(5.0) is None
    assert restarts.given_up
    assert restarts.total == 6


def test_ends_of_long_ago_do_not_count() -> None:
    restarts = Restarts()
    for hour in range(10):
        assert restarts.ended(3600.0 * hour) == 0.1
    assert restarts.ended(3600.0 * 9 + 59.9) == 0.4
    assert restarts.ended(3600.0 * 9 + 60.0) == 0.4


def test_the_operator_may_try_again() -> None:
    restarts = Restarts()
    while restarts.ended(0.0) is not None:
        pass
    restarts.forgive()
    assert not restarts.given_up
    assert restarts.ended(0.0) == 0.1
