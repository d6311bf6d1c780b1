"""Admission, preemption and the watermark: who gets pages."""

from echokernels.runtime.sequence import SequenceStatus
from tests.runtime.toy_model import NEVER_STOP, assert_output, make_engine, prompt, shape


def test_admission_takes_the_pages_of_the_whole_sequence():
    # 16 slots, and two prompts of 10 tokens whose first chunks would fit together.
    engine = make_engine(num_pages=4, page_size=4, max_num_batched_tokens=8, max_prefill_chunk=4)
    first = engine.add("a", prompt(10), max_tokens=1)
    second = engine.add("b", prompt(10), max_tokens=1)
    engine.step()
    assert len(first.block_table) == 3
    assert second.status is SequenceStatus.WAITING
    engine.drain()
    assert engine.scheduler.num_preemptions == 0


def test_admission_is_first_come_first_served():
    engine = make_engine(num_pages=4, page_size=4)
    engine.add("a", prompt(8), max_tokens=5, **NEVER_STOP)
    engine.step()
    engine.add("large", prompt(9))
    small = engine.add("small", prompt(1))
    engine.step()
    assert small.status is SequenceStatus.WAITING  # it would fit, but "large" was first


def test_watermark_holds_only_while_something_runs():
    # A quarter of 8 pages must stay free. "a" has 4; "b" needs 3 and would leave 1.
    engine = make_engine(num_pages=8, page_size=4, watermark=0.25)
    engine.add("a", prompt(13), max_tokens=2, **NEVER_STOP)
    b = engine.add("b", prompt(9), max_tokens=1, **NEVER_STOP)
    engine.step()
    assert b.status is SequenceStatus.WAITING
    engine.step()
    whole = engine.add("whole", prompt(31), max_tokens=1, **NEVER_STOP)
    engine.step()
    assert b.is_finished
    assert whole.status is SequenceStatus.WAITING
    engine.step()
    assert whole.is_finished  # alone, it may take every page


def test_watermark_is_rounded_up():
    engine = make_engine(num_pages=4, page_size=4, watermark=0.01)
    engine.add("a", prompt(4), **NEVER_STOP)
    b = engine.add("b", prompt(12))
    engine.step()
    assert b.status is SequenceStatus.WAITING


def test_youngest_is_preempted_and_returns_before_those_who_wait():
    engine = make_engine(num_pages=3, page_size=2, max_num_seqs=3)
    a, b, c = (engine.add(x, prompt(2), max_tokens=4, **NEVER_STOP) for x in "abc")
    late = engine.add("late", prompt(1), max_tokens=1, **NEVER_STOP)
    engine.step()
    # "a" needs a second page: "c" goes. "b" needs one too, and only itself is left to go: it waits.
    assert shape(engine.step()) == [("a", 2, 1, True)]
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["c", "late"]
    assert [seq.request_id for seq in engine.scheduler.running] == ["a", "b"]
    engine.drain()
    for seq in (a, b, c, late):
        assert_output(seq, limit=6)
    assert (a.num_preemptions, c.num_preemptions) == (0, 1)
    assert engine.scheduler.num_preemptions == b.num_preemptions + c.num_preemptions


def test_preempted_sequence_does_not_return_in_the_same_step():
    # "b" gives up 3 pages and "a" takes one. The rest would do for a part of "b", or for "c".
    engine = make_engine(num_pages=4, page_size=2)
    engine.add("a", prompt(2), max_tokens=6, **NEVER_STOP)
    engine.add("b", prompt(5), max_tokens=3, **NEVER_STOP)
    engine.add("c", prompt(1), max_tokens=1)
    engine.step()
    assert shape(engine.step()) == [("a", 2, 1, True)]
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["b", "c"]
    assert engine.block_manager.num_free == 2


def test_youngest_in_flight_sits_out_one_step_and_is_then_preempted():
    engine = make_engine(num_pages=2, page_size=2)
    a = engine.add("a", prompt(2), max_tokens=2, **NEVER_STOP)
    b = engine.add("b", prompt(1), max_tokens=3, **NEVER_STOP)
    assert shape(engine.launch()) == [("b", 0, 1, True), ("a", 0, 2, True)]
    # "a" needs a page. "b", which has it, could go on, but is in flight: both wait.
    assert engine.launch().entries == []
    assert b.num_preemptions == 0
    engine.commit()
    assert shape(engine.launch()) == [("a", 2, 1, True)]
    assert b.num_preemptions == 1
    engine.drain(depth=2)
    assert_output(a, limit=4)
    assert_output(b, limit=4)


def test_held_sequence_is_preempted_while_a_later_batch_is_in_flight():
    # "a" needs a third page in its second step, when all are taken and all are in flight.
    engine = make_engine(num_pages=4, page_size=2)
    a = engine.add("a", prompt(2), max_tokens=6, **NEVER_STOP)
    b = engine.add("b", prompt(3), max_tokens=5, **NEVER_STOP)
    c = engine.add("c", prompt(1), max_tokens=5, **NEVER_STOP)
    engine.launch()
    assert shape(engine.launch()) == [("b", 3, 1, True)]
    assert c.status is SequenceStatus.RUNNING  # held
    engine.commit()
    assert ("a", 2, 1, True) in shape(engine.launch())
    assert c.status is SequenceStatus.WAITING
    engine.drain(depth=2)
    for seq in (a, b, c):
        assert_output(seq, limit=8)
