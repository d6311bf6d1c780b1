"""Batches in flight: placeholders, late stops, aborts, order of commits."""

import pytest

from echokernels.runtime.sequence import SequenceStatus
from tests.runtime.toy_model import (
    ALL_IDS,
    NEVER_STOP,
    assert_output,
    generate,
    make_engine,
    prompt,
    shape,
)


def test_placeholder_is_the_input_of_the_next_step():
    engine = make_engine()
    seq = engine.add("a", prompt(3), max_tokens=4, **NEVER_STOP)
    engine.launch()
    assert shape(engine.launch()) == [("a", 3, 1, True)]
    assert seq.token_ids == [*prompt(3), -1, -1]
    assert (seq.num_tokens, seq.num_computed_tokens, seq.num_placeholders) == (5, 4, 2)
    assert (seq.num_output_tokens, seq.output_token_ids) == (0, [])
    engine.commit()
    first = generate(prompt(3), seq.params, 64)[0][0]
    assert seq.token_ids == [*prompt(3), first, -1]
    assert seq.output_token_ids == [first]
    engine.drain(depth=2)
    assert_output(seq, limit=64)


def test_late_stop_ignores_the_token_in_flight_and_keeps_pages_until_it_is_committed():
    engine = make_engine(num_pages=4, page_size=2)
    seq = engine.add("a", prompt(2), stop_token_ids=ALL_IDS)
    engine.launch()
    engine.launch()
    assert engine.commit() == [seq]
    assert (seq.num_output_tokens, seq.num_tokens, seq.num_placeholders) == (1, 3, 0)
    # The batch in flight still writes the KV of the stop token into the second page.
    assert engine.block_manager.num_free == 2
    assert not engine.scheduler.has_unfinished
    tokens = list(seq.token_ids)
    assert engine.commit() == []
    assert seq.token_ids == tokens
    assert engine.block_manager.num_free == 4


@pytest.mark.parametrize("num_committed", [0, 1, 2])
def test_abort_in_flight(num_committed):
    engine = make_engine(num_pages=8, page_size=2)
    other = engine.add("other", prompt(3), max_tokens=5)
    seq = engine.add("a", prompt(3), **NEVER_STOP)
    engine.launch()
    engine.launch()
    for _ in range(num_committed):
        engine.commit()
    used = len(seq.block_table)
    assert engine.scheduler.abort("a")
    engine.scheduler.check()
    assert (seq.status, seq.finish_reason) == (SequenceStatus.FINISHED, "abort")
    assert len(seq.block_table) == (used if num_committed < 2 else 0)
    assert seq.num_output_tokens == num_committed
    assert not engine.scheduler.abort("a")
    engine.drain(depth=2)
    assert seq.output_token_ids == generate(prompt(3), seq.params, 64)[0][:num_committed]
    assert_output(other, limit=16)


def test_abort_between_chunks_in_flight():
    engine = make_engine(max_num_batched_tokens=4)
    seq = engine.add("a", prompt(12))
    engine.launch()
    engine.launch()
    assert engine.scheduler.abort("a")
    assert engine.commit() == engine.commit() == []
    assert engine.block_manager.num_free == 16
    assert seq.output_token_ids == []


def test_abort_while_waiting():
    engine = make_engine(max_num_seqs=1)
    first = engine.add("a", prompt(3), max_tokens=3)
    waiting = engine.add("b", prompt(3))
    engine.step()
    assert engine.scheduler.abort("b")
    engine.scheduler.check()
    assert waiting.finish_reason == "abort"
    assert not engine.scheduler.abort("never seen")
    engine.drain()
    assert_output(first, limit=64)


def test_finish_for_a_stop_string_with_tokens_in_flight():
    engine = make_engine()
    seq = engine.add("a", prompt(3), **NEVER_STOP)
    engine.launch()
    engine.launch()
    engine.commit()
    engine.scheduler.finish(seq, "stop", "STOP")
    engine.scheduler.check()
    assert (seq.finish_reason, seq.stop_reason, seq.num_output_tokens) == ("stop", "STOP", 1)
    assert engine.commit() == []
    assert seq.num_output_tokens == 1
    assert engine.block_manager.num_free == 16


def test_stop_string_in_the_last_token_replaces_length_but_not_abort():
    engine = make_engine()
    last = engine.add("a", prompt(3), max_tokens=1, **NEVER_STOP)
    aborted = engine.add("b", prompt(3))
    engine.step()
    assert (last.finish_reason, last.stop_reason) == ("length", None)
    engine.scheduler.finish(last, "stop", "STOP")
    assert (last.finish_reason, last.stop_reason) == ("stop", "STOP")
    engine.scheduler.abort("b")
    engine.scheduler.finish(aborted, "stop", "STOP")
    assert (aborted.finish_reason, aborted.stop_reason) == ("abort", None)
    engine.scheduler.check()


def test_fail_ends_one_request_with_its_message():
    engine = make_engine()
    seq, other = (engine.add(x, prompt(3), max_tokens=3) for x in "ab")
    engine.launch()
    engine.scheduler.fail(seq, "logits are NaN")
    engine.scheduler.fail(seq, "a second message")
    assert (seq.finish_reason, seq.error) == ("error", "logits are NaN")
    engine.drain()
    assert_output(other, limit=64)


def test_failed_step_is_committed_with_any_ids():
    engine = make_engine()
    for name in "ab":
        engine.add(name, prompt(3))
    batch = engine.scheduler.schedule()
    for entry in batch.entries:
        engine.scheduler.fail(entry.seq, "out of memory")
    assert engine.scheduler.commit(batch, [0, 0]) == []
    engine.scheduler.check()
    assert engine.block_manager.num_free == 16


@pytest.mark.parametrize(
    ("token_ids", "match"),
    [([], "must be 2 ids"), ([1], "must be 2 ids"), ([1, 2, 3], "must be 2"), ([1, -1], "-1")],
)
def test_commit_refuses_ids_that_do_not_fit(token_ids, match):
    engine = make_engine()
    for name in "ab":
        engine.add(name, prompt(3), **NEVER_STOP)
    batch = engine.scheduler.schedule()
    with pytest.raises(ValueError, match=match):
        engine.scheduler.commit(batch, token_ids)
    engine.scheduler.check()
    assert engine.scheduler.commit(batch, [1, 2]) == []  # nothing was changed


def test_commit_refuses_batches_out_of_order():
    engine = make_engine()
    engine.add("a", prompt(3), **NEVER_STOP)
    first, second = engine.scheduler.schedule(), engine.scheduler.schedule()
    with pytest.raises(ValueError, match="oldest"):
        engine.scheduler.commit(second, [1])
    engine.scheduler.commit(first, [1])
    with pytest.raises(ValueError, match="oldest"):
        engine.scheduler.commit(first, [1])


def test_empty_batch_is_not_in_flight():
    engine = make_engine()
    batch = engine.scheduler.schedule()
    assert (batch.entries, batch.num_tokens) == ([], 0)
    with pytest.raises(ValueError, match="oldest"):
        engine.scheduler.commit(batch, [])
