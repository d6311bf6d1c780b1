"""Requests from beginning to end, and what a step contains."""

import pytest

from echokernels.runtime.sequence import SequenceStatus
from tests.runtime.toy_model import ALL_IDS, NEVER_STOP, assert_output, make_engine, prompt, shape


def test_a08_last_block_of_exact_multiple():
    engine = make_engine(page_size=4)
    seq = engine.add("a", prompt(8), **NEVER_STOP)  # exactly 2 pages
    engine.step()
    assert len(seq.block_table) == 2
    assert shape(engine.step()) == [("a", 8, 1, True)]
    assert len(seq.block_table) == 3  # the 9th token opens a page
    for _ in range(3):
        engine.step()
    assert (seq.num_computed_tokens, len(seq.block_table)) == (12, 3)
    engine.step()
    assert len(seq.block_table) == 4


@pytest.mark.parametrize("depth", [1, 2])
def test_a27_preempted_at_a_block_and_one_token_resumes_with_the_same_tokens(depth):
    # Both prompts fill a page of 4 and their first output opens another, for which the third and
    # last page is not enough: "b" is preempted at 5 tokens.
    engine = make_engine(num_pages=3, page_size=4)
    a = engine.add("a", prompt(4), max_tokens=6, **NEVER_STOP)
    b = engine.add("b", prompt(4, salt=1), max_tokens=6, **NEVER_STOP)
    engine.step()
    while not b.num_preemptions:
        engine.step()
    assert (b.num_tokens, b.num_output_tokens, b.num_computed_tokens) == (5, 1, 0)
    assert (b.status, b.block_table) == (SequenceStatus.WAITING, [])
    engine.drain(depth)
    assert_output(a, limit=12)
    assert_output(b, limit=12)


def test_a27_resumed_sequence_computes_prompt_and_output_in_chunks():
    engine = make_engine(num_pages=3, page_size=4, max_prefill_chunk=3)
    engine.add("a", prompt(4), max_tokens=6, **NEVER_STOP)
    b = engine.add("b", prompt(4, salt=1), max_tokens=6, **NEVER_STOP)
    while not b.num_preemptions:
        engine.step()
    while b.status is SequenceStatus.WAITING:
        batch = engine.step()
    # 5 tokens, one of them an output, and chunks of 3: what it is follows from the counts alone.
    assert ("b", 0, 3, False) in shape(batch)
    assert ("b", 3, 2, True) in shape(engine.step())
    engine.drain()
    assert_output(b, limit=12)


def test_a28_prompt_larger_than_the_cache_is_refused_and_others_go_on():
    engine = make_engine(num_pages=4, page_size=4)
    other = engine.add("other", prompt(3), max_tokens=4)
    with pytest.raises(ValueError, match=r"'large' is 17 tokens long, must be at most 16.*4 pages"):
        engine.add("large", prompt(17))
    engine.drain()
    assert_output(other, limit=16)


def test_a28_output_larger_than_the_cache_ends_with_length():
    engine = make_engine(num_pages=4, page_size=4)
    seq = engine.add("a", prompt(10), max_tokens=20, **NEVER_STOP)
    other = engine.add("b", prompt(10, salt=1), max_tokens=20, **NEVER_STOP)
    engine.drain()
    assert seq.num_output_tokens == other.num_output_tokens == 6
    assert seq.finish_reason == other.finish_reason == "length"
    assert_output(seq, limit=16)
    assert_output(other, limit=16)


def test_a32_request_id_is_unique_among_unfinished_ones():
    engine = make_engine()
    first = engine.add("x", prompt(3), max_tokens=2)
    with pytest.raises(ValueError, match="request_id is 'x', must differ"):
        engine.add("x", prompt(4), max_tokens=2)
    engine.drain()
    again = engine.add("x", prompt(5), max_tokens=2)
    engine.drain()
    assert_output(first, limit=64)
    assert_output(again, limit=64)


def test_a32_request_id_is_free_again_while_its_last_batch_is_in_flight():
    engine = make_engine()
    first = engine.add("x", prompt(3), **NEVER_STOP)
    engine.launch()
    assert engine.scheduler.abort("x")
    again = engine.add("x", prompt(5), max_tokens=4)
    engine.launch()
    engine.drain(depth=2)
    assert first.output_token_ids == []
    assert_output(again, limit=64)


def test_a33_ignore_eos_but_not_stop_token_ids():
    engine = make_engine()
    plain = engine.add("plain", prompt(6))
    ignoring = engine.add("ignoring", prompt(6), ignore_eos=True, max_tokens=40)
    stopping = engine.add("stopping", prompt(6), ignore_eos=True, stop_token_ids=ALL_IDS)
    engine.drain()
    for seq in (plain, ignoring, stopping):
        assert_output(seq, limit=64)
    assert (plain.finish_reason, plain.stop_reason) == ("stop", None)
    assert (ignoring.finish_reason, ignoring.num_output_tokens) == ("length", 40)
    assert stopping.stop_reason == stopping.output_token_ids[-1]


def test_a35_empty_prompt_is_refused():
    engine = make_engine()
    other = engine.add("other", prompt(2), max_tokens=3)
    with pytest.raises(ValueError, match="prompt of request 'x' is empty"):
        engine.add("x", [])
    engine.drain()
    assert_output(other, limit=64)


@pytest.mark.parametrize(
    ("length", "max_tokens", "outputs"),
    # Context 16: one token is left; none is; and 15 is as far as 11 + 4 goes.
    [(15, 5, 1), (16, 5, 0), (16, None, 0), (11, 4, 4), (11, None, 5)],
)
@pytest.mark.parametrize("depth", [1, 2])
def test_a35_output_ends_at_the_context(length, max_tokens, outputs, depth):
    engine = make_engine(max_model_len=16)
    seq = engine.add("a", prompt(length), max_tokens=max_tokens, **NEVER_STOP)
    engine.drain(depth)
    assert (seq.num_output_tokens, seq.finish_reason) == (outputs, "length")
    assert_output(seq, limit=16)


def test_a35_prompt_beyond_the_context_is_refused():
    engine = make_engine(max_model_len=16)
    with pytest.raises(ValueError, match=r"17 tokens long, must be at most 16.*max_model_len"):
        engine.add("a", prompt(17))
    assert not engine.scheduler.has_unfinished


def test_chunks_sample_only_with_the_last_known_token():
    engine = make_engine(max_num_batched_tokens=4)
    seq = engine.add("a", prompt(10), max_tokens=3, **NEVER_STOP)
    shapes = [shape(engine.step())[0] for _ in range(5)]
    assert shapes == [
        ("a", 0, 4, False),
        ("a", 4, 4, False),
        ("a", 8, 2, True),
        ("a", 10, 1, True),
        ("a", 11, 1, True),
    ]
    assert_output(seq, limit=64)


def test_max_prefill_chunk_leaves_budget_to_others():
    engine = make_engine(max_num_batched_tokens=10, max_prefill_chunk=4)
    engine.add("a", prompt(9))
    engine.add("b", prompt(5))
    engine.add("c", prompt(3))
    assert shape(engine.step()) == [("a", 0, 4, False), ("b", 0, 4, False), ("c", 0, 2, False)]
    # "b" and "c" have a single token left: decodes of their prompts, so to say.
    assert shape(engine.step()) == [("b", 4, 1, True), ("c", 2, 1, True), ("a", 4, 4, False)]


def test_decodes_come_first_then_chunks_then_admissions():
    engine = make_engine(max_num_batched_tokens=6, max_num_seqs=4)
    engine.add("long", prompt(8), **NEVER_STOP)
    engine.step()
    engine.add("short", prompt(2), **NEVER_STOP)
    engine.step()  # the rest of "long", and "short"
    engine.add("next", prompt(7), **NEVER_STOP)
    assert shape(engine.step()) == [
        ("long", 8, 1, True),
        ("short", 2, 1, True),
        ("next", 0, 4, False),
    ]
    engine.add("one", prompt(1), **NEVER_STOP)
    batch = engine.step()
    # A prompt of one token is admitted last and still stands with the single tokens.
    assert shape(batch) == [
        ("long", 9, 1, True),
        ("short", 3, 1, True),
        ("one", 0, 1, True),
        ("next", 4, 3, True),
    ]
    assert (batch.num_decodes, batch.num_tokens, batch.num_samples) == (3, 6, 4)


def test_budget_reaches_chunks_beside_many_decodes():
    # As many sequences as tokens of budget: were one more let in, a decode or a chunk would starve.
    engine = make_engine(num_pages=64, max_num_batched_tokens=4, max_num_seqs=100)
    for i in range(3):
        engine.add(f"decode{i}", prompt(1, salt=i), max_tokens=30, **NEVER_STOP)
    engine.step()
    chunked = engine.add("chunked", prompt(20), max_tokens=1)
    engine.add("fifth", prompt(1), max_tokens=30)
    for computed in range(1, 21):
        batch = engine.step()
        assert batch.num_decodes >= 3
        assert len(engine.scheduler.running) <= 4
        assert chunked.is_finished or chunked.num_computed_tokens == computed
    assert_output(chunked, limit=256)


def test_max_num_seqs():
    engine = make_engine(max_num_seqs=2)
    seqs = [engine.add(str(i), prompt(2, salt=i), max_tokens=3) for i in range(5)]
    while engine.scheduler.has_unfinished:
        assert 1 <= len(engine.step().entries) <= 2
    for seq in seqs:
        assert_output(seq, limit=64)


def test_full_sequence_is_not_scheduled_beyond_its_cap():
    engine = make_engine()
    seq = engine.add("a", prompt(3), max_tokens=2, **NEVER_STOP)
    engine.launch()
    engine.launch()
    assert seq.num_tokens == seq.max_total_tokens
    assert engine.launch().entries == []  # both outputs are on their way: nothing to do
    engine.commit()
    assert engine.commit() == [seq]
    assert_output(seq, limit=64)
