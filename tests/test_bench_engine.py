"""The benchmark of whole engines, on a CPU and small."""

import csv

import pytest

from bench import engine
from bench.engine_workloads import FULL, QUICK, WORKLOADS
from bench.engines import Timeline, percentile


def test_every_workload_runs(tmp_path, capfd):
    out = tmp_path / "engine.csv"
    assert engine.main(["--quick", "--option", "page_size=8", "--out", str(out)]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [row["workload"] for row in rows] == list(WORKLOADS)
    for row in rows:
        workload = WORKLOADS[row["workload"]](QUICK)
        assert int(row["output_tokens"]) == workload.output_tokens
        assert float(row["tokens_per_s"]) > 0
        assert float(row["first_p50_ms"]) <= float(row["first_p99_ms"])
    assert rows[0]["options"] == "page_size=8"
    # All requests come before the last is served.
    assert float(rows[-1]["seconds"]) >= max(WORKLOADS["arrivals"](QUICK).arrivals)
    assert "offline-256" in capfd.readouterr().out


def test_an_engine_that_fails_is_told(tmp_path, capfd):
    out = tmp_path / "engine.csv"
    assert engine.main(["--quick", "--option", "page_size=-1", "--out", str(out)]) == 1
    assert "page_size is -1" in capfd.readouterr().err
    assert len(out.read_text().splitlines()) == 1


def test_workloads_are_those_of_the_peers():
    offline = WORKLOADS["offline-256"](FULL)
    assert (len(offline.prompts), offline.prompt_tokens, offline.output_tokens) == (
        256, 142_827, 133_966,
    )  # fmt: skip
    first = WORKLOADS["offline-64"](FULL)
    assert first.outputs == offline.outputs[:64]
    assert [len(p) for p in first.prompts] == [len(p) for p in offline.prompts[:64]]
    assert first.prompts[0] != offline.prompts[0]
    shared, unshared = (WORKLOADS[name](FULL) for name in ("shared-prefix", "unshared"))
    assert {len(p) for p in shared.prompts} == {len(p) for p in unshared.prompts} == {2176}
    assert len({tuple(p[:2048]) for p in shared.prompts}) == 8
    assert len({tuple(p[:2048]) for p in unshared.prompts}) == 256
    assert max(map(len, WORKLOADS["realistic"](FULL).prompts)) <= FULL.longest


def test_times_between_tokens():
    timeline = Timeline(5, 2.0, [0.0, 0.5], [[0.25, 0.5, 1.0], [1.0, 2.0]])
    assert timeline.to_first == [0.25, 0.5]
    assert timeline.between == [0.25, 0.5, 1.0]


@pytest.mark.parametrize(("share", "value"), [(0.0, 1), (0.5, 3), (0.99, 4), (1.0, 4)])
def test_percentile(share, value):
    assert percentile([4, 1, 3, 2], share) == value
