"""`Scheduler.check` finds what it is there to find."""

import pytest

from echokernels.runtime.sequence import SequenceStatus
from tests.runtime.toy_model import NEVER_STOP, make_engine, prompt


def _give_pages_back(scheduler, seq):
    scheduler.block_manager.free(seq.block_table)


def _leak_pages(scheduler, _seq):
    scheduler.block_manager.allocate(1)


def _hold_an_idle_page(scheduler, seq):
    scheduler.block_manager.append(seq.block_table, 100)


def _count_too_far(_scheduler, seq):
    seq.num_computed_tokens = seq.num_tokens + 1


def _lose_a_placeholder(_scheduler, seq):
    seq.num_placeholders -= 1


def _lose_a_batch(scheduler, _seq):
    scheduler.in_flight.popleft()


def _forget_to_queue(scheduler, seq):
    scheduler.running.remove(seq)


def _swap(scheduler, _seq):
    scheduler.running.reverse()


def _run_too_many(scheduler, _seq):
    scheduler._max_running = 1


def _run_more_than_the_budget_feeds(scheduler, _seq):
    scheduler._budget = 1


def _finish_without_reason(_scheduler, seq):
    seq.status = SequenceStatus.FINISHED


@pytest.mark.parametrize(
    "damage",
    [
        _give_pages_back,
        _leak_pages,
        _hold_an_idle_page,
        _count_too_far,
        _lose_a_placeholder,
        _lose_a_batch,
        _forget_to_queue,
        _swap,
        _run_too_many,
        _run_more_than_the_budget_feeds,
        _finish_without_reason,
    ],
)
def test_check_finds(damage):
    engine = make_engine(num_pages=64)
    seq, _ = (engine.add(x, prompt(3), **NEVER_STOP) for x in "ab")
    engine.launch()
    damage(engine.scheduler, seq)
    with pytest.raises(AssertionError):
        engine.scheduler.check()


def test_check_finds_pages_freed_under_a_late_batch():
    engine = make_engine()
    seq = engine.add("a", prompt(3))
    engine.launch()
    engine.scheduler.abort("a")
    engine.block_manager.free(seq.block_table)
    with pytest.raises(AssertionError, match="freed pages"):
        engine.scheduler.check()
