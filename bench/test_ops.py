"""The registry through pytest-benchmark: `pytest bench/test_ops.py --benchmark-only`.

A round is a replay of a graph of calls on a GPU, a loop over them on a CPU. The extra information
has their number and the microseconds of one. Results are checked before they are timed.
"""

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.case import Case, error_of, ours, poisoned_allocations
from bench.ops import FULL, QUICK, cases
from bench.timing import make_round, synchronize


def _name(case: Case) -> str:
    return f"{case.op}-{case.name}"


@pytest.mark.parametrize("case", cases(FULL), ids=_name)
def test_op(benchmark: BenchmarkFixture, case: Case) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    _measure(benchmark, case, torch.device("cuda"))


@pytest.mark.parametrize("case", cases(QUICK), ids=_name)
def test_op_on_the_cpu(benchmark: BenchmarkFixture, case: Case) -> None:
    _measure(benchmark, case, torch.device("cpu"))


@torch.no_grad()
def _measure(benchmark: BenchmarkFixture, case: Case, device: torch.device) -> None:
    torch.manual_seed(0)
    inputs = case.make(device)
    with poisoned_allocations():
        assert error_of(ours(case), inputs, case.check(inputs)) <= case.tolerance

    sets = case.rotation(inputs, device)
    work = make_round([ours(case).prepare(*inputs) for inputs in sets], device)

    def run() -> None:
        work.run()
        synchronize(device)

    benchmark.group = case.op
    benchmark(run)
    benchmark.extra_info["calls"] = work.num_calls
    if benchmark.stats:  # absent with --benchmark-disable
        benchmark.extra_info["us"] = benchmark.stats["median"] / work.num_calls * 1e6
