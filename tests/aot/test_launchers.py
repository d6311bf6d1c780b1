"""What a replay takes apart of Triton's launchers is there in the version it does so for."""

import pytest
import triton
from triton.backends.nvidia import driver

from echokernels import _tensor_map


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="only 3.6 is taken apart")
def test_the_c_launcher_is_behind_the_one_for_descriptors():
    def launcher():
        pass

    signature = {0: "*bf16", 1: "tensordesc<bf16[64, 64],layout>"}
    notes = [{"fp4_padded": False, "swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [8]}]
    wrapped = driver.wrap_handle_tensordesc(launcher, signature, notes)
    assert wrapped is not launcher
    assert _tensor_map.unwrapped(wrapped) == (launcher, notes)
    without = driver.wrap_handle_tensordesc(launcher, {0: "*bf16"}, None)
    assert _tensor_map.unwrapped(without) is None


def test_other_functions_are_not_taken_apart():
    assert _tensor_map.unwrapped(lambda: None) is None
    assert _tensor_map.unwrapped(print) is None
