"""The benchmark harness: what it lets pass, what it refuses to time, what it writes."""

import csv
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import (
    accuracy,
    compare,
    host_cost,
    kv_layout,
    ladder,
    libraries,
    plot,
    results,
    timing,
)
from bench.case import Case, Peer, error_of, ours, returning
from bench.ceilings import Ceiling
from bench.checks import MOST_DEVIATIONS, drawn_by_probability, most_likely, row_error
from bench.inputs import ragged_lengths, sampling
from bench.measure import measure_case
from bench.ops import FULL, QUICK, cases
from bench.report import report
from bench.run import main

CPU = torch.device("cpu")
CEILINGS = {kind: Ceiling(kind, "any", 10**9, 1.0) for kind in ("copy", "read", "matmul")}


def quick_case(op: str) -> Case:
    return next(case for case in cases(QUICK) if case.op == op)


def fail(*_: object) -> torch.Tensor:
    raise RuntimeError("no such luck\nand more")


def test_quick_run_writes_every_row(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHO_COMMIT", "abc123")
    out = tmp_path / "new" / "ops.csv"
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--filter", "T1_"]
    assert main([*arguments, "--op", "rms_norm", "--op", "fused_add_rms_norm"]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [(row["op"], row["impl"]) for row in rows] == [
        *[("ceiling", "device")] * 3,
        ("rms_norm", "echo"),
        ("rms_norm", "torch"),
        ("fused_add_rms_norm", "echo"),
        ("fused_add_rms_norm", "torch"),
    ]
    for row in rows:
        assert row["ok"] == "True"
        assert float(row["graph_us"]) > 0
        assert float(row["rate"]) > 0
        assert row["unit"] == ("TFLOP/s" if row["case"].startswith("matmul") else "TB/s")
        assert (row["gpu"], row["commit"]) == ("cpu", "abc123")
        assert row["torch"] == torch.__version__
    for row in rows[3:]:
        assert float(row["error"]) < 2.0**-7


def test_a_cpu_gets_tiny_shapes_only(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cpu"])
    assert "must be cuda unless --quick is given" in capsys.readouterr().err


def test_a_wrong_result_gets_no_time():
    case = quick_case("rms_norm")
    wrong = replace(case, run=lambda x, weight, eps: case.run(x, weight, eps) * 1.1)
    mine, peer = measure_case(wrong, CPU, CEILINGS)
    assert not mine.ok
    assert mine.graph_us is mine.rate is mine.share is None
    assert mine.note.startswith("wrong: error ")
    assert peer.ok
    assert peer.graph_us is not None


def test_a_peer_that_rounds_more_has_its_own_tolerance():
    case = quick_case("rms_norm")

    def coarse(x, weight, eps):
        return case.run(x, weight, eps) * 1.01

    peers = {"strict": returning(coarse), "lenient": returning(coarse, tolerance=0.02)}
    oks = [row.ok for row in measure_case(replace(case, peers=peers), CPU, CEILINGS)]
    assert oks == [True, False, True]
    [mine, *_] = measure_case(replace(case, run=coarse, peers=peers), CPU, CEILINGS)
    assert not mine.ok


def test_an_unwritten_output_is_wrong():
    # A fresh allocation often holds the right result of the run before it.
    case = replace(quick_case("rms_norm"), run=lambda x, *_: torch.empty_like(x))
    assert measure_case(case, CPU, CEILINGS)[0].error == float("inf")


def test_a_failure_stops_nothing_else():
    case = quick_case("rms_norm")
    peers = {"broken": Peer(lambda *_: fail), **case.peers}
    mine, broken, peer = measure_case(replace(case, run=fail, peers=peers), CPU, CEILINGS)
    assert mine.note == broken.note == "failed: RuntimeError: no such luck"
    assert not mine.ok
    assert peer.ok

    [row] = measure_case(replace(case, make=fail), CPU, CEILINGS)
    assert (row.impl, row.ok) == ("echo", False)


def test_in_place_runs_do_not_spoil_the_checks_after_them():
    case = quick_case("fused_add_rms_norm")
    assert all(row.ok for row in measure_case(case, CPU, CEILINGS))


@pytest.mark.parametrize("case", cases(QUICK), ids=lambda case: f"{case.op}-{case.name}")
def test_every_quick_case_is_right(case):
    torch.manual_seed(0)
    inputs = case.make(CPU)
    judge = case.check(inputs)
    for peer in (ours(case), *case.peers.values()):
        assert error_of(peer, inputs, judge) <= case.tolerance


def test_full_registry():
    full = cases(FULL)
    names = [(case.op, case.name) for case in full]
    assert len(set(names)) == len(names)
    assert {case.op for case in full} == {case.op for case in cases(QUICK)}
    # Ragged batches, several queries and windows have peers in other libraries only.
    alone = {case.name for case in full if not case.peers}
    assert all(re.search("ragged|_q4|_w4095", name) for name in alone), alone
    by_name = {case.name: case for case in full if case.op == "paged_attention"}
    # 64 x 8,192 tokens of 8 heads x 128 in K and V, bf16: 2.147 GB; 1 MB of queries and outputs.
    assert by_name["64x8k_h32/8"].num_bytes == 2_148_532_224


def test_ragged_lengths_never_change():
    # The batch that published figures are for; its 64 contexts have 262,084 tokens.
    assert ragged_lengths(64, 128, 16_384)[:4] == [7702, 5063, 985, 450]


def test_one_wrong_row_among_many_shows():
    wanted = torch.randn(4096, 64, dtype=torch.float64)
    actual = wanted.bfloat16()
    assert row_error(actual, wanted) < 2.0**-8
    actual[77] = 0
    assert row_error(actual, wanted) > 0.5
    actual[77, 3] = float("nan")
    assert row_error(actual, wanted) == float("inf")
    assert row_error(actual[:-1], wanted) == float("inf")


def test_draws_are_judged_by_their_distribution():
    torch.manual_seed(0)
    inputs = sampling(CPU, 64, 50, 1.0, 10, 1.0)
    judge = drawn_by_probability(inputs)
    kept = inputs[0].topk(10)
    fair = torch.multinomial(kept.values.softmax(-1), 1)
    assert judge(kept.indices.gather(-1, fair)[:, 0]) < MOST_DEVIATIONS
    always_the_last = kept.indices[:, -1].clone()
    assert judge(always_the_last) > MOST_DEVIATIONS
    uniform = kept.indices.gather(-1, torch.randint(10, (64, 1)))[:, 0]
    assert judge(uniform) > MOST_DEVIATIONS
    excluded = inputs[0].argmin(-1)
    assert judge(excluded) == float("inf")


def test_greedy_accepts_any_of_equal_maxima():
    logits = torch.tensor([[1.0, 3.0, 3.0], [5.0, 0.0, 0.0]])
    judge = most_likely((logits,))
    assert judge(torch.tensor([1, 0])) == judge(torch.tensor([2, 0])) == 0.0
    assert judge(torch.tensor([0, 0])) == judge(torch.tensor([1, 3])) == 0.5


def test_rotated_inputs_exceed_the_l2(monkeypatch):
    class Properties:
        L2_cache_size = 60 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    for kib, times in ((8, 2), (1 << 10, 2), (20 << 10, 20), (200 << 10, 64), (8 << 20, 64)):
        num_sets = timing.num_sets(kib << 10, torch.device("cuda"))
        assert num_sets * (kib << 10) > times * Properties.L2_cache_size
        assert num_sets <= max(64, 2 * Properties.L2_cache_size // (kib << 10) + 1)


def test_rows_are_on_disk_before_the_file_is_closed(tmp_path):
    file = results.ResultsFile(tmp_path / "x.csv", {"gpu": "none"})
    file.write([results.Row("op", "case", "echo")])
    assert (tmp_path / "x.csv").read_text().splitlines()[1] == "op,case,echo,,,,,,False,,,none"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_a_partial_run_keeps_the_other_rows_of_a_file(tmp_path):
    def lines():
        return [
            (row["op"], row["case"], row["impl"], row["commit"])
            for row in csv.DictReader((tmp_path / "x.csv").open())
        ]

    def rows(op, case, *impls):
        return [results.Row(op, case, impl) for impl in impls]

    def run(commit, *cases, keep=True):
        file = results.ResultsFile(tmp_path / "x.csv", {"commit": commit}, keep=keep)
        for case in (("ceiling", "copy", "device"), *cases):
            file.write(rows(*case))

    run("a", ("norm", "T1", "echo", "liger"), ("norm", "T2", "echo"), ("rope", "T1", "echo"))
    run("b", ("norm", "T1", "echo"), ("norm", "T3", "echo"), ("new", "T1", "echo"))
    assert lines() == [
        ("ceiling", "copy", "device", "a"),
        ("ceiling", "copy", "device", "b"),
        ("norm", "T1", "echo", "b"),
        ("norm", "T2", "echo", "a"),
        ("norm", "T3", "echo", "b"),
        ("rope", "T1", "echo", "a"),
        ("new", "T1", "echo", "b"),
    ]
    run("c", ("norm", "T2", "echo"), ("rope", "T1", "echo"))
    assert {commit for *_, commit in lines()} == {"b", "c"}
    run("d")
    assert ("ceiling", "copy", "device", "d") in lines()
    run("d", ("norm", "T1", "echo"), keep=False)
    assert lines() == [("ceiling", "copy", "device", "d"), ("norm", "T1", "echo", "d")]


def test_files_are_read_as_they_were_written(tmp_path):
    rows = [
        results.Row("op", "case", "echo", 1.5, None, 2.0, "TB/s", 0.5, ok=True, error=0.0),
        results.Row("op", "case", "peer", note="failed: no such luck"),
    ]
    results.ResultsFile(tmp_path / "x.csv", {"gpu": "none"}).write(rows)
    assert results.read_rows(tmp_path / "x.csv") == rows


def test_the_default_file_is_the_committed_one():
    assert results.default_path("ops", "NVIDIA H200", quick=False).exists()


def test_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("ECHO_COMMIT", raising=False)
    monkeypatch.setattr(results, "_ROOT", tmp_path)
    assert results.commit() == "unknown"


def timed(case: str, us: float, share: float) -> results.Row:
    return results.Row("op", case, "echo", us, share=share, ok=True)


@pytest.mark.parametrize(
    ("before", "now", "fails"),
    [
        ((100.0, 0.80), (105.0, 0.761), False),  # 4.9% below
        ((100.0, 0.80), (105.0, 0.759), True),  # 5.1% below
        ((100.0, 0.80), (130.0, 0.80), False),  # slower, as the device itself is
        ((100.0, 0.80), (90.0, 0.70), True),  # faster, on a faster device
        ((2.9, 0.10), (3.09, 0.01), False),  # below 3 us the time counts alone
        ((2.9, 0.10), (3.11, 0.10), True),
        ((3.1, 0.10), (3.4, 0.096), False),
    ],
)
def test_regression_gate(before, now, fails):
    result = compare.compare([timed("x", *before)], [timed("x", *now)])
    assert bool(result.failed) == fails
    assert result.passed == ([] if fails else [("op", "x")])


def test_regression_gate_leaves_no_case_out():
    wrong = results.Row("op", "wrong", "echo", note="wrong: error 1")
    before = [timed(case, 9.0, 0.5) for case in ("both", "gone", "wrong")]
    never_right = results.Row("op", "never right", "echo", note="failed: no such luck")
    peer = replace(timed("peer's", 9.0, 0.5), impl="torch")
    now = [timed("both", 9.0, 0.5), timed("new", 9.0, 0.5), timed("never right", 9.0, 0.5), wrong]
    result = compare.compare([*before, never_right, peer], now)
    assert result.passed == [("op", "both")]
    assert result.failed == {("op", "wrong"): "wrong: error 1"}
    assert result.only_before == [("op", "gone")]
    assert result.only_now == [("op", "new"), ("op", "never right")]


def test_a_second_measurement_counts():
    slow, fast = timed("x", 9.0, 0.1), timed("x", 9.0, 0.5)
    assert compare.compare([fast], [slow, fast]).passed
    assert compare.compare([fast], [fast, slow]).failed


@pytest.mark.parametrize(("old_us", "status"), [(1e9, 0), (1e-9, 1)])
def test_compare_measures_anew(tmp_path, capsys, old_us, status):
    path = tmp_path / "ops.csv"
    old = results.Row("rms_norm", "T1_H64", "echo", old_us, share=1e-9, ok=True)
    gone = replace(old, case="T1_H63")
    unselected = replace(old, op="silu_and_mul")
    results.ResultsFile(path, {}).write([old, gone, unselected])
    arguments = ["--device", "cpu", "--quick", "--op", "rms_norm", "--against", str(path)]
    assert compare.main(arguments) == status
    output = capsys.readouterr().out
    assert "only in the file: rms_norm T1_H63" in output
    assert "new: rms_norm T5_H64" in output
    assert "silu_and_mul" not in output
    assert f"{1 - status} cases passed, {status} failed" in output


def test_compare_needs_something_to_compare(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--device", "cpu", "--quick", "--against", str(tmp_path / "none.csv")])
    assert "which does not exist" in capsys.readouterr().err
    results.ResultsFile(tmp_path / "empty.csv", {})
    arguments = ["--device", "cpu", "--quick", "--op", "rms_norm"]
    assert compare.main([*arguments, "--against", str(tmp_path / "empty.csv")]) == 1


def test_host_time_is_that_of_the_calls_alone(monkeypatch):
    now, queued = 0.0, 0

    def launch(us: float) -> None:
        nonlocal now, queued
        now, queued = now + us * 1e-6, queued + 1
        assert queued < 100  # a device that lags 1,000 launches behind makes the host wait

    def wait(_: torch.device) -> None:
        nonlocal now, queued
        now, queued = now + 1, 0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing, "synchronize", wait)
    calls = [partial(launch, 3), partial(launch, 12)]
    assert timing.host_us(calls, CPU) == pytest.approx([3, 12])


def test_host_cost_has_every_op_and_name(tmp_path):
    names = [(case.op, name) for case in host_cost.host_cases(quick=True) for name in case.peers]
    assert names == [("fused_add_rms_norm", f"echo-{form}") for form in ("packet", "overload")]
    ops = [case.op for case in host_cost.host_cases(quick=True)]
    assert sorted(ops) == sorted({case.op for case in cases(QUICK)})

    out = tmp_path / "host.csv"
    arguments = ["--device", "cpu", "--quick", "--op", "fused_add_rms_norm", "--out", str(out)]
    assert host_cost.main(arguments) == 0
    rows = results.read_rows(out)
    assert [row.impl for row in rows] == ["torch", "echo", "echo-packet", "echo-overload"]
    for row in rows:
        assert row.ok
        assert row.host_us > 0
        assert row.rate > 0


def test_an_absent_library_is_reported_once(monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(f"No module named {name!r}\nand more")

    monkeypatch.setattr(libraries, "import_module", absent)
    reports: list[str] = []
    assert libraries.load(torch.device("cuda"), reports.append) == []
    assert [report.split(" ")[0] for report in reports] == [
        "flashinfer", "vllm", "vllm_moe", "vllm_fa3", "vllm_triton", "sglang", "fa3", "liger",
    ]  # fmt: skip
    assert reports[1].endswith("left out: ImportError: No module named 'vllm._C_stable_libtorch'")
    assert libraries.load(CPU, fail) == []


def test_libraries_add_peers_to_the_cases_of_their_ops():
    kernels = {"rms_norm": {"theirs": Peer(lambda *_: fail)}}
    case = libraries.with_peers(quick_case("rms_norm"), [kernels])
    assert [*case.peers] == ["torch", "theirs"]
    other = quick_case("silu_and_mul")
    assert libraries.with_peers(other, [kernels]) == other


def test_a_peer_gets_only_cases_that_it_can_take():
    dense = {"flash_attn_varlen": {"theirs": Peer(lambda *_: fail, needs=frozenset({"dense"}))}}
    of_prefill = [case for case in cases(QUICK) if case.op == "flash_attn_varlen"]
    taken = [c.name for c in of_prefill if "theirs" in libraries.with_peers(c, [dense]).peers]
    assert taken == ["2x24_h4/2_d32", "full_2x24_h4/2_d32", "window4_2x24_h4/2_d32"]


def test_cpu_speed_needs_equal_tokens():
    # Imported here because it brings the whole runtime.
    from bench.cpu_speed import Contender, _compare

    fast = Contender("1 prompt", "echo", list, seconds=[1.0, 2.0, 9.0], tokens=[[1, 2, 3, 4]])
    slow = Contender("1 prompt", "peer", list, seconds=[8.0], tokens=[[1, 2, 3, 4]])
    mine, peer = _compare(fast, slow)
    assert (mine.rate, peer.rate, mine.note) == (2.0, 0.5, "4.00x peer")
    slow.tokens = [[1, 2, 3, 5]]
    mine, peer = _compare(fast, slow)
    assert mine.rate is peer.rate is None
    assert not mine.ok


def test_the_performance_page_is_what_the_results_say():
    page = Path(__file__).parent.parent / "docs/performance.md"
    assert page.read_text() == report()


def test_accuracy_of_the_quick_cases(tmp_path):
    path = tmp_path / "accuracy.csv"
    assert accuracy.main(["--quick", "--device", "cpu", "--out", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert {row["impl"] for row in rows} == {"echo", "sdpa-math", "sdpa-math-dense-kv"}
    for row in rows:
        assert 1e-4 < float(row["rate"]) <= float(row["error"]) < 1e-2


def test_ladder_of_the_quick_cases(tmp_path):
    path = tmp_path / "ladder.csv"
    assert ladder.main(["--quick", "--device", "cpu", "--out", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert [row["impl"] for row in rows[:6]] == [
        "echo", "splits-of-64", "not-split", "gathered", "int8", "int8-dequantised-first",
    ]  # fmt: skip
    scratch = {row["impl"]: float(row["rate"]) for row in rows if row["case"] == "32"}
    # On a CPU only what is gathered takes memory.
    assert scratch["not-split"] == scratch["splits-of-64"] == scratch["echo"] == 0
    assert scratch["int8"] == 0
    assert scratch["gathered"] == scratch["int8-dequantised-first"]
    assert scratch["gathered"] == pytest.approx(2 * 32 * 8 * 128 * 2, rel=1e-4)
    assert all(row["ok"] == "True" and float(row["graph_us"]) > 0 for row in rows)


def test_layouts_hold_the_same_pages(tmp_path):
    cache = torch.randn(3, 16, 2, 8)
    other = kv_layout.head_major(cache)
    assert torch.equal(other, cache)
    assert other.stride() == (256, 8, 128, 1)
    path = tmp_path / "layout.csv"
    assert kv_layout.main(["--quick", "--device", "cpu", "--out", str(path)]) == 0
    rows = list(csv.DictReader(path.open()))
    assert {row["impl"] for row in rows} == {"echo", "head-major"}
    assert all(row["ok"] == "True" for row in rows)


def test_plots_of_all_results(tmp_path):
    ladder.main(["--quick", "--device", "cpu", "--out", str(tmp_path / "ladder-cpu.csv")])
    shutil.copy(results.RESULTS / "ops-h200.csv", tmp_path)
    paths = list(plot.plots(tmp_path, tmp_path))
    assert [path.name for path in paths] == ["decode-h200.svg", "ladder-cpu.svg"]
    of_decode, of_ladder = (path.read_text() for path in paths)
    assert "batch 64" in of_decode
    assert "gathered" in of_ladder
