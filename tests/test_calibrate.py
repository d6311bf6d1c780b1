"""Which sharing of keys is taken as the best, and that a decode takes it."""

import pytest
import torch

from echokernels import _calibration, calibrate
from echokernels._target import KNOWN_TARGETS, assume
from echokernels.attention import decode_hopper
from echokernels.attention._sharing import (
    Kind,
    Sharing,
    forced_sharing,
    forget_calibration,
    sharing_of,
)

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
KIND = Kind("hopper", 128, torch.bfloat16, 4, False)
DEFAULT, FAST, OTHER = decode_hopper.SHARINGS
ALLOWED = decode_hopper.SHARINGS


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHOKERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "GPU X")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    forget_calibration()
    yield
    forget_calibration()


def run(kinds, by, advance=lambda _: None):
    """Every context takes 100 us, with FAST less."""
    return calibrate.calibrate(
        kinds,
        lambda _: (DEFAULT, FAST, OTHER),
        lambda _kind, _contexts, sharings: [100.0 * (by if s == FAST else 1) for s in sharings],
        advance,
    )


def test_the_fastest_is_kept_and_used():
    seen = []
    large = KIND._replace(is_large=True)
    entries = run([KIND, large], 0.9, seen.append)
    assert [*entries] == [KIND.key, large.key]
    assert seen == [KIND, large]
    assert all(Sharing(**entry) == FAST for entry in entries.values())
    assert sharing_of(CUDA, KIND, DEFAULT, ALLOWED) == DEFAULT
    _calibration.save("GPU X", entries)
    assert sharing_of(CUDA, KIND, DEFAULT, ALLOWED) == DEFAULT  # read once
    forget_calibration()
    assert sharing_of(CUDA, KIND, DEFAULT, ALLOWED) == FAST
    assert sharing_of(CUDA, KIND._replace(head_dim=96), DEFAULT, ALLOWED) == DEFAULT
    assert sharing_of(CPU, KIND, DEFAULT, ALLOWED) == DEFAULT
    with forced_sharing(OTHER):
        assert sharing_of(CUDA, KIND, DEFAULT, ALLOWED) == OTHER


@pytest.mark.parametrize("entry", [{}, {"per_sm": 2}, {"block_n": 32, "per_sm": 9}])
def test_what_the_kernel_does_not_have_is_passed_over(entry):
    _calibration.save("GPU X", {KIND.key: entry})
    assert sharing_of(CUDA, KIND, DEFAULT, ALLOWED) == DEFAULT


def test_a_gain_within_the_noise_changes_nothing():
    [entry] = run([KIND], 0.998).values()
    assert Sharing(**entry) == DEFAULT


def test_contexts_count_alike_whatever_they_take():
    # Twice as fast on one short context is worth more than 1.7 times on a long one.
    sharings = (DEFAULT, FAST, OTHER)
    assert calibrate.best(sharings, [[1.0, 0.5, 1.0], [1000.0, 1000.0, 600.0]]) == FAST


@pytest.mark.parametrize("target", KNOWN_TARGETS)
def test_the_default_is_the_first_candidate(target):
    with assume(KNOWN_TARGETS[target]):
        kinds = calibrate.kinds(CPU)
        of_codes = 6 if target == "sm_90" else 0
        assert len({kind.key for kind in kinds}) == len(kinds) == 8 + of_codes
        for kind in kinds:
            first, *others = calibrate.candidates(kind, CPU)
            assert first not in others
            if kind.kernel == "hopper":
                of = decode_hopper.default_sharing(kind.is_large)
                assert first == of
            else:
                assert 1 <= first.per_sm <= 4


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, -1])
def test_one_kind_on_a_gpu(cuda, index):
    kind = calibrate.kinds(cuda)[index]
    [entry] = calibrate.calibrate(
        [kind], lambda kind: calibrate.candidates(kind, cuda), calibrate.decode_us
    ).values()
    assert Sharing(**entry) in calibrate.candidates(kind, cuda)
