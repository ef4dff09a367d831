"""The product that each GPU of a group must make right; made by a CPU here, and spoilt."""

from __future__ import annotations

import numpy as np
import pytest

from raytf.errors import GpuError
from raytf.training.process.gpu import check_product, factors, fault


def test_a_cpu_makes_it_right():
    check_product(["/CPU:0"])


def test_sums_stay_below_what_float32_counts_exactly():
    a, b = factors()
    assert a.max() == b.max() == 15
    assert (a.astype(np.float64) @ b.astype(np.float64)).max() < 2**24
    assert np.array_equal(a, a.astype(np.float16))  # whole in TF32 as well, which has as many bits


@pytest.mark.parametrize("bit", [0, 13, 22])
def test_one_bit_of_one_entry_is_found(bit):
    a, b = factors(256)
    got = a @ b
    assert fault(got, 256) == ""
    got.view(np.uint32)[200, 17] ^= 1 << bit
    assert fault(got, 256).startswith("1 of 65536 entries of a matrix product are wrong, the first at [200, 17]: ")


def test_a_device_that_miscalculates_is_a_fault_of_its_node():
    def multiply(device: str) -> np.ndarray:
        a, b = factors()
        return a @ b + (device == "/GPU:1")

    check_product(["/GPU:0"], multiply)
    with pytest.raises(GpuError, match=r"node here: GPU:1 miscalculates: 1048576 of 1048576 entries"):
        check_product(["/GPU:0", "/GPU:1"], multiply)
