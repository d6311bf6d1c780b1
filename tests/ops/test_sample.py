"""sample against a float64 oracle, its edges and its contract."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echokernels._target import INTERPRETED
from echokernels.sampling import reference
from echokernels.sampling.sample import _config, _group, sample
from tests.ops import sampling_oracle as oracle
from tests.ops.sampling_oracle import per_row, rows_of
from tests.strategies import dtypes, generator, poisoned, randn, seeds, strided_randn

# 1: less than a Philox group; 5: a ragged one; 1,000: less than a tile; 4,099: a ragged second one.
VOCABS = [1, 5, 1000, 4099]
INF, NAN = float("inf"), float("nan")


@st.composite
def cases(draw):
    rows = draw(st.integers(1, 4))

    def lists(*values):
        return st.lists(st.sampled_from(values), min_size=rows, max_size=rows)

    args = {
        "temperature": draw(lists(1e-4, 0.25, 0.8, 1.0, 1.7, 30.0, 1e38, INF)),
        "top_k": draw(lists(0, 0, -1, 1, 2, 50, 999, 10**6)),
        "top_p": draw(lists(1.0, 1.0, 0.0, 0.1, 0.5, 0.9, 0.999)),
        "min_p": draw(lists(0.0, 0.0, 1e-3, 0.1, 1.0)),
        "seeds": draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows)),
        "positions": draw(lists(0, 1, 131_071, 2**31 - 1, 2**40 + 3)),
    }
    return rows, args


@given(
    case=cases(),
    vocab=st.sampled_from(VOCABS),
    dtype=dtypes,
    pad=st.sampled_from([0, 1, 16]),
    # At scale 1 the nucleus is thousands of ids, at 20 a few. In whole numbers most ids tie.
    scale=st.sampled_from([1.0, 4.0, 20.0]),
    whole=st.booleans(),
    masked=st.booleans(),
    seed=seeds,
)
def test_sample(device, case, vocab, dtype, pad, scale, whole, masked, seed):
    rows, args = case
    gen = generator(seed)
    logits = strided_randn(rows, vocab, dtype=dtype, device=device, gen=gen, pad=pad, scale=scale)
    if whole:
        logits.copy_(logits.round())
    if masked:
        logits[:, 1::3] = -INF
    args = per_row(device, rows, **args)
    logprobs = poisoned(rows, dtype=torch.float32, device=device)
    tokens = sample(logits, *args, logprobs=logprobs)
    for row, token, logprob in zip(
        rows_of(logits, args), tokens.tolist(), logprobs.tolist(), strict=True
    ):
        assert oracle.accepts(row, token)
        assert logprob == pytest.approx(oracle.logprob(row, token), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("vocab", [49_152, 151_937])
def test_large_vocabulary(device, vocab):
    logits = randn(4, vocab, dtype=torch.bfloat16, device=device, gen=generator(1), scale=4.0)
    # k above and below the 4,096 ids of a tile: the search begins elsewhere.
    args = per_row(device, 4, top_k=[0, 50, 5000, 0], top_p=[1.0, 0.9, 0.9, 0.99])
    for row, token in zip(rows_of(logits, args), sample(logits, *args).tolist(), strict=True):
        assert oracle.accepts(row, token)


def test_a34_tiny_temperatures_are_greedy(device):
    logits = torch.tensor([[2.9, 3.0, 11.1]], dtype=torch.float16, device=device)
    for temperature in (1e-4, 1e-5, 1e-6, 1e-20, 1e-37, 1e-38, 1e-40, 1e-45, 0.0, NAN, -1.0):
        logprobs = poisoned(8, dtype=torch.float32, device=device)
        args = per_row(device, 8, temperature=temperature, top_p=0.9)
        assert sample(logits.repeat(8, 1), *args, logprobs=logprobs).tolist() == [2] * 8
        assert logprobs.tolist() == pytest.approx([-0.000579] * 8, rel=1e-2)


def test_a34_a_row_does_not_depend_on_its_batch(device):
    gen = generator(3)
    logits = randn(6, 1000, dtype=torch.bfloat16, device=device, gen=gen, scale=3.0)
    args = per_row(
        device, 6, temperature=[0.8, 1.0, 0.0, 1.2, 0.8, 2.0], top_k=[0, 40, 0, 0, 7, 0],
        top_p=[1.0, 0.9, 1.0, 0.3, 1.0, 0.99], seeds=[42, 1, 2, 3, 42, -5],
        positions=[9, 1, 2, 3, 9, 4],
    )  # fmt: skip

    def run(rows):
        logprobs = poisoned(len(rows), dtype=torch.float32, device=device)
        tokens = sample(logits[rows], *(arg[rows] for arg in args), logprobs=logprobs)
        return list(zip(tokens.tolist(), logprobs.tolist(), strict=True))

    together = run(list(range(6)))
    assert run(list(range(6))) == together
    assert run([5, 4, 3, 2, 1, 0]) == together[::-1]
    assert [run([row])[0] for row in range(6)] == together


def test_greedy_takes_the_lowest_id_on_ties(device):
    # Ties within a tile, in different and in the same lanes of two tiles, and of 0.0 with -0.0.
    logits = torch.full((4, 9000), -1.0, device=device)
    logits[0, [17, 3, 900]] = 5.0
    logits[1, [8000, 4100]] = 5.0
    logits[2, [5, 4096 + 5]] = 5.0
    logits[3, 40], logits[3, 41] = -0.0, 0.0
    assert sample(logits, *per_row(device, 4, temperature=0.0)).tolist() == [3, 4100, 5, 40]


def test_a18_bad_logits(device):
    gen = generator(6)
    clean = randn(6, 1000, dtype=torch.float32, device=device, gen=gen)
    logits = clean.clone()
    logits[1], logits[2], logits[3] = NAN, INF, -INF
    logits[4, ::2] = NAN
    logits[5, [7, 500]] = INF
    for temperature in (0.0, 1.0, INF):
        args = per_row(device, 6, temperature=temperature)
        logprobs = poisoned(6, dtype=torch.float32, device=device)
        tokens = sample(logits, *args, logprobs=logprobs).tolist()
        assert tokens[0] == sample(clean, *args).tolist()[0]
        assert tokens[1] == tokens[3] == 0  # nothing above -inf
        assert 0 <= tokens[2] < 1000
        assert tokens[2] == 0 or temperature > 0
        assert tokens[4] % 2 == 1  # NaN is never drawn
        assert tokens[5] == 7 or (temperature == 1.0 and tokens[5] == 500) or temperature == INF
        uniform = -math.log(1000)
        assert logprobs[1:4].tolist() == pytest.approx([uniform] * 3, rel=1e-5)
        finite = logits[4].double().nan_to_num(-INF)
        want = float(finite[tokens[4]] - finite.logsumexp(0))
        assert logprobs[4].item() == pytest.approx(want, rel=1e-5)


def test_a23_index_tensors_of_both_widths(device):
    count = 16 if INTERPRETED else 512
    probs = torch.tensor([0.5, 0.25, 0.125, 0.125], device=device)
    logits = probs.log().repeat(3 * count, 1)
    args = per_row(device, 3 * count, top_k=[1, 2, 4] * count)
    results = []
    for dtype in (torch.int32, torch.int64):
        temperature, top_k, *filters, row_seeds, positions = args
        tokens = torch.empty(3 * count, dtype=dtype, device=device)
        sample(
            logits, temperature, top_k.to(dtype), *filters, row_seeds, positions.to(dtype),
            tokens=tokens,
        )  # fmt: skip
        assert tokens.dtype == dtype
        results.append(tokens.tolist())
    assert results[0] == results[1]
    assert [max(results[0][row::3]) for row in range(3)] == [0, 1, 3]


def test_a22_no_rows(device):
    logprobs = torch.empty(0, device=device)
    tokens = sample(torch.empty(0, 50, device=device), *per_row(device, 0), logprobs=logprobs)
    assert tokens.shape == (0,)


def test_filters_may_be_absent(device):
    logits = randn(3, 50, dtype=torch.float32, device=device, gen=generator(7))
    temperature, *filters, row_seeds, positions = per_row(device, 3)
    got = sample(logits, temperature, None, None, None, row_seeds, positions)
    assert torch.equal(got, sample(logits, temperature, *filters, row_seeds, positions))


def test_logits_survive(device):
    logits = randn(3, 50, dtype=torch.float32, device=device, gen=generator(8))
    before = logits.clone()
    sample(logits, *per_row(device, 3, top_k=5, top_p=0.5), logprobs=torch.empty(3, device=device))
    assert torch.equal(logits, before)


def test_reference_honours_float64():
    # The two largest scores differ by less than fp32 tells apart.
    logits = torch.tensor([[1.0, 1.0 + 1e-12]], dtype=torch.float64)
    tokens = torch.empty(1, dtype=torch.int64)
    reference.sample(tokens, None, logits, *per_row("cpu", 1, temperature=0.0))
    assert tokens.item() == 1
    reference.sample(tokens, None, logits, *per_row("cpu", 1, top_k=1))
    assert tokens.item() == 1


def bad_calls(device):
    logits = torch.randn(3, 8, device=device)
    args = per_row(device, 3)

    def changed(index, tensor):
        return (logits, *args[:index], tensor, *args[index + 1 :])

    yield ValueError, "logits has shape (8,), must have 2 dimensions", (logits[0], *args)
    yield TypeError, "logits.dtype is float64, must be", (logits.double(), *args)
    yield (
        ValueError,
        "logits.stride() is (1, 3), must be 1 in",
        (torch.randn(8, 3).T.to(device), *args),
    )
    yield ValueError, "must have a last dimension from 1 to 16777216", (logits[:, :0], *args)
    yield ValueError, "temperature.shape is (2,), must be (3)", changed(0, args[0][:2])
    yield TypeError, "temperature.dtype is float16, must be float32", changed(0, args[0].half())
    yield TypeError, "top_k.dtype is float32, must be int32, int64", changed(1, args[2])
    yield TypeError, "seeds.dtype is int32, must be int64", changed(4, args[4].int())
    wide = torch.zeros(6, dtype=torch.int64, device=device)
    yield ValueError, "positions.stride() is (2,), must be 1", changed(5, wide[::2])


def test_bad_arguments(device):
    for error, message, args in bad_calls(device):
        with pytest.raises(error) as caught:
            sample(*args)
        assert message in str(caught.value)


def test_a21_opcheck(device):
    overload = torch.ops.echo.sample.default
    logits = torch.randn(3, 40, device=device)[:, :30]
    args = per_row(device, 3, top_k=4, top_p=0.9)
    tokens = torch.empty(3, dtype=torch.int32, device=device)
    for logprobs in (None, torch.empty(3, device=device)):
        torch.library.opcheck(overload, (tokens, logprobs, logits, *args))


def test_slices_hold_whole_groups_and_ignore_the_batch():
    assert _config(151_936) == _config(49_152)
    for vocab in (*VOCABS, 49_152, 151_936, 2**18, 2**18 + 1, 2**24):
        assert _config(vocab).block_n % _group(vocab) == 0
        # What the second kernel keeps in registers.
        assert -(-vocab // _group(vocab)) <= 8192


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65_535, 65_536, 70_000])
def test_a22_more_rows_than_a_grid_dimension(cuda, rows):
    logits = torch.randn(rows, 16, device=cuda)
    args = per_row(cuda, rows)
    halves = [
        sample(*parts)
        for parts in zip(*(t.split(rows // 2 + 1) for t in (logits, *args)), strict=True)
    ]
    assert torch.equal(sample(logits, *args), torch.cat(halves))


@pytest.mark.gpu
def test_a01_more_than_2_31_elements(cuda):
    rows = 2**31 // 49_152 + 2
    logits = torch.randn(rows, 49_152, dtype=torch.bfloat16, device=cuda)
    args = per_row(cuda, rows, top_p=0.9)
    last = sample(logits[-2:].clone(), *(arg[-2:] for arg in args))
    assert torch.equal(sample(logits, *args)[-2:], last)


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 8.0])  # most ids are candidates, only some
def test_top_p_at_the_very_share_of_some_ids(cuda, scale):
    # Threads that did not agree on the last bit of the mass would wait for each other for ever.
    logits = randn(1, 49_152, dtype=torch.bfloat16, device=cuda, gen=generator(5), scale=scale)
    heaviest = logits[0].double().sort(descending=True).values
    shares = heaviest.softmax(0).cumsum(0)[:-1][heaviest[:-1] > heaviest[1:]]
    shares = shares[(shares > 0.05) & (shares < 0.999)][:64].float()
    # All numbers nearby: one of them rounds the target to the very sum that it is compared with.
    nearby = torch.arange(-32, 33, dtype=torch.int32, device=cuda)
    top_p = (shares.view(torch.int32)[:, None] + nearby).flatten().view(torch.float32)
    args = per_row(cuda, len(top_p), top_p=top_p.tolist(), seeds=[7] * len(top_p))
    logits = logits.expand(len(top_p), -1)
    tokens = sample(logits, *args)
    of_share = tokens.view(-1, 65)
    assert ((of_share == of_share[:, :1]) | (of_share == of_share[:, -1:])).all()
    some = [0, 64, -65, -1]
    judged = rows_of(logits[some], [arg[some] for arg in args])
    for row, token in zip(judged, tokens[some].tolist(), strict=True):
        assert oracle.accepts(row, token)


@pytest.mark.gpu
def test_captured_graph_replays_on_new_values(cuda):
    logits = torch.randn(4, 5000, device=cuda)
    args = per_row(cuda, 4, top_k=[0, 50, 0, 0], top_p=[1.0, 0.9, 0.5, 1.0])
    logprobs = torch.empty(4, device=cuda)
    tokens = sample(logits, *args, logprobs=logprobs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sample(logits, *args, tokens=tokens, logprobs=logprobs)
    # Which rows filter or are greedy is decided on the device.
    logits.copy_(torch.randn(4, 5000, device=cuda))
    for buffer, value in zip(
        args,
        per_row(cuda, 4, temperature=[0.0, 1.0, 2.0, 0.5], top_k=[0, 0, 9, 40], seeds=8),
        strict=True,
    ):
        buffer.copy_(value)
    graph.replay()
    want = torch.empty(4, device=cuda)
    assert torch.equal(tokens, sample(logits, *args, logprobs=want))
    assert torch.equal(logprobs, want)


@pytest.mark.gpu
def test_compiled_equals_eager(cuda):
    compiled = torch.compile(sample, fullgraph=True, dynamic=True)
    for rows in (3, 17):
        logits = torch.randn(rows, 1000, dtype=torch.bfloat16, device=cuda)
        args = per_row(cuda, rows, top_k=20)
        assert torch.equal(compiled(logits, *args), sample(logits, *args))


@pytest.mark.multi_gpu
@pytest.mark.usefixtures("two_gpus")
def test_a20_device_that_is_not_current():
    logits = torch.randn(5, 1000)
    first, second = (
        sample(logits.to(f"cuda:{index}"), *per_row(f"cuda:{index}", 5, top_p=0.9))
        for index in range(2)
    )
    assert second.device.index == 1
    assert torch.cuda.current_device() == 0
    assert torch.equal(first.cpu(), second.cpu())
