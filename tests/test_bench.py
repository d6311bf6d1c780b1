"""The benchmark harness: what it lets pass, what it refuses to time, what it writes."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import results, timing
from bench.case import Case, Peer, error_of, ours
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
        assert float(row["eager_us"]) > 0
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
    assert mine.graph_us is mine.eager_us is mine.rate is mine.share is None
    assert mine.note.startswith("wrong: error ")
    assert peer.ok
    assert peer.graph_us is not None


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
    assert all(len(case.peers) > 0 for case in full if "ragged" not in case.name)
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


def test_rotated_inputs_exceed_the_l2_twice(monkeypatch):
    class Properties:
        L2_cache_size = 60 << 20

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    for set_bytes in (8 << 10, 1 << 20, 200 << 20):
        assert (
            timing.num_sets(set_bytes, torch.device("cuda")) * set_bytes
            > 2 * Properties.L2_cache_size
        )


def test_rows_are_on_disk_before_the_file_is_closed(tmp_path):
    with results.ResultsFile(tmp_path / "x.csv", {"gpu": "none"}) as file:
        file.write([results.Row("op", "case", "echo")])
        assert (tmp_path / "x.csv").read_text().splitlines()[1] == "op,case,echo,,,,,,False,,,none"


def test_commit_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("ECHO_COMMIT", raising=False)
    monkeypatch.setattr(results, "_ROOT", tmp_path)
    assert results.commit() == "unknown"


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
