"""Which memory of a GPU a model that is served or predicts may take. There is no GPU: TensorFlow's part is played."""

from __future__ import annotations

from typing import Any

import pytest

from raytf.distributed.devices import set_memory
from raytf.distributed.gpu.nvidia_driver import Gpu, part_mib

GIB = 1 << 30
L4 = Gpu("GPU-1", "NVIDIA L4", 24 * GIB)


class Config:
    """In the place of `tf.config`; refuses what TensorFlow refuses once it has begun."""

    def __init__(self, gpus: int, has_begun: bool = False):
        self._gpus, self._has_begun = gpus, has_begun
        self.experimental, self.grows, self.limits = self, [], {}

    def list_physical_devices(self, kind: str) -> list[str]:
        assert kind == "GPU"
        return [f"/physical_device:GPU:{i}" for i in range(self._gpus)]

    def LogicalDeviceConfiguration(self, memory_limit: int) -> int:
        return memory_limit

    def set_logical_device_configuration(self, device: str, parts: list[int]) -> None:
        self._begin()
        self.limits[device] = parts

    def set_memory_growth(self, device: str, enable: bool) -> None:
        self._begin()
        assert enable
        self.grows.append(device)

    def _begin(self) -> None:
        if self._has_begun:
            raise RuntimeError("Physical devices cannot be modified after being initialized")


@pytest.mark.parametrize(
    ("gpus", "share", "known", "grows", "limits"),
    [
        (0, 1.0, [], 0, {}),
        (1, 1.0, [L4], 1, {}),
        (2, 1.0, [L4, L4], 2, {}),
        (1, 0.5, [L4], 0, {"/physical_device:GPU:0": [12 * 1024 - 600]}),
        (1, 0.5, [], 1, {}),  # nobody knows how much there is
    ],
)
def test_a_whole_gpu_is_taken_as_needed_and_of_a_part_no_more_than_that(gpus, share, known, grows, limits):
    config = Config(gpus)
    set_memory(share, config, lambda: known)
    assert (len(config.grows), config.limits) == (grows, limits)


def test_where_tensorflow_has_begun_it_stays_as_it_is():
    config: Any = Config(1, has_begun=True)
    set_memory(0.5, config, lambda: [L4])
    set_memory(1.0, config, lambda: [L4])
    assert (config.grows, config.limits) == ([], {})


@pytest.mark.parametrize(("share", "mib"), [(1.0, 23976), (0.25, 5544), (0.01, 256)])
def test_a_part_leaves_cuda_its_own(share, mib):
    assert part_mib(24 * GIB, share) == mib
