"""Matrix products on a CPU and on a GPU, in one table: what an accelerator is worth, before it is paid for.

    python jobs/matmul.py                                           # here, on one worker
    ray job submit --working-dir . -- python jobs/matmul.py         # on a cluster, with a GPU where it has one

Shows `raytf.on_workers` with TensorFlow inside, and how to time it: each size is computed once to warm up, then several
times; the result is fetched before the clock stops, since a GPU answers before it has computed.

Expect the CPU's speed to level off from about 1000 on, and the GPU's to grow with the size until it is 10 to 100 times
as fast; small products are faster on the CPU, since a GPU takes longer to start than to compute them. Without a GPU
there are rows of the CPU only, and a line that says so: one core of a 2.x GHz Xeon made 3, 75, 102 and 105 GFLOP/s.
"""

from dataclasses import dataclass, field

import raytf


@dataclass(frozen=True)
class Job:
    """Time matrix products on a worker's CPU and GPU."""

    sizes: tuple[int, ...] = (64, 256, 1024, 2048)
    """Rows of the square matrices."""
    repeats: int = 10
    """Products of which the fastest counts."""
    cluster: raytf.WorkerFlags = field(default_factory=lambda: raytf.WorkerSection(workers="1"))


def measure(part: tuple[int, int]) -> list[tuple[str, float]]:
    """(device, seconds of the fastest product) on each device of the worker; of (size, repeats)."""
    import time

    import tensorflow as tf

    size, repeats = part
    found = []
    for device in ("CPU:0", *(["GPU:0"] if tf.config.list_physical_devices("GPU") else [])):
        with tf.device(device):
            a, b = (tf.random.stateless_uniform((size, size), (i, 0)) for i in range(2))
            tf.linalg.matmul(a, b)[0, 0].numpy()
            best = float("inf")
            for _ in range(repeats):
                began = time.perf_counter()
                tf.linalg.matmul(a, b)[0, 0].numpy()
                best = min(best, time.perf_counter() - began)
        found.append((device[:3], best))
    return found


def main(job: Job) -> None:
    if not job.sizes or min(job.sizes) < 1 or job.repeats < 1:
        raise raytf.ConfigError("--sizes and --repeats: expected numbers, 1 or more.")
    rows = raytf.on_workers(measure, [(size, job.repeats) for size in job.sizes], workers=job.cluster)
    print(f"{'size':>6}  {'device':>6}  {'ms':>10}  {'GFLOP/s':>10}  {'against CPU':>11}")
    for size, found in zip(job.sizes, rows, strict=True):
        for device, seconds in found:
            speed, ratio = 2 * size**3 / seconds / 1e9, found[0][1] / seconds
            print(f"{size:>6}  {device:>6}  {seconds * 1e3:>10.3f}  {speed:>10.1f}  {ratio:>10.2f}x")
    if all(len(found) == 1 for found in rows):
        print("no worker has a GPU: rows of the CPU only")


if __name__ == "__main__":
    raytf.cli(main)
