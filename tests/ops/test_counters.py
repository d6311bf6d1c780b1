"""Counters that launches share: zeros at every launch, never one for two that may run together."""

import pytest
import torch

from echokernels import _counters, flash_attn_varlen
from echokernels._path import forced_path


def test_without_a_gpu_each_is_fresh():
    first, second = (_counters.counter(torch.device("cpu"), 2) for _ in range(2))
    assert first.tolist() == second.tolist() == [0, 0]
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.gpu
def test_one_for_each_stream_and_for_each_captured_launch(cuda):
    def here():
        return _counters.counter(cuda, 2).data_ptr()

    side = torch.cuda.Stream()
    first = here()
    assert here() == first
    with torch.cuda.stream(side):
        other = here()
        assert here() == other != first
    graph, captured = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        captured = [here(), here()]
        torch.zeros(1, device=cuda)
    assert len({first, other, *captured}) == 4
    assert here() == first


@pytest.mark.gpu
def test_a_capture_with_no_counter_left_zeroes_its_own(cuda, monkeypatch):
    _counters.counter(cuda, 2)
    supply = _counters._supplies[torch.cuda.current_device(), 2]
    monkeypatch.setattr(supply, "unused", [])
    monkeypatch.setattr(supply, "kept", [])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        counter = _counters.counter(cuda, 2)
    counter.fill_(7)
    graph.replay()
    assert counter.tolist() == [0, 0]
    assert supply.kept[0] is counter


@pytest.mark.gpu
def test_launches_leave_zeros(cuda):
    q = torch.randn(900, 4, 64, device=cuda).bfloat16()
    k = torch.randn(900, 2, 64, device=cuda).bfloat16()
    cu_seqlens = torch.tensor([0, 100, 900], dtype=torch.int32, device=cuda)

    def attend():
        return flash_attn_varlen(q, k, k, cu_seqlens, cu_seqlens, 800, 800, causal=True)

    with forced_path("portable"):
        want = attend()
    first = attend()
    torch.testing.assert_close(first, want, rtol=0, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [attend(), attend()]
    side = torch.cuda.Stream()
    for _ in range(20):
        for out in captured:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        with torch.cuda.stream(side):
            beside = attend()
        outs = [attend(), beside, *captured]
        torch.cuda.synchronize()
        assert all(torch.equal(out, first) for out in outs)
    supply = _counters._supplies[torch.cuda.current_device(), 2]
    assert not any(counter.any() for counter in supply.of_stream.values())
