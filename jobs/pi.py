"""Pi by throwing darts, on all workers at once: the cluster at work without any training.

    python jobs/pi.py                                               # here, two CPU workers
    ray job submit --working-dir . -- python jobs/pi.py --workers 1:64 --samples 100000000000  # on a cluster

Shows `raytf.on_workers`: a function of one part of the work, and a list of parts. Each part has a seed of its own, so
the answer is the same to the last bit for every number of workers, however many of them are killed on the way.

Expect the error to shrink as 1 / sqrt(n), so that the last column neither grows nor shrinks: it is 1.3 on average, and
above 4.9 once in 370 lines. The defaults give 3.1414434, which is 0.00015 off.
"""

from dataclasses import dataclass, field

import raytf


@dataclass(frozen=True)
class Job:
    """Estimate pi from random points in a square."""

    samples: int = 1 << 27
    """Points in all."""
    samples_per_part: int = 1 << 23
    """Points that a worker draws in one go."""
    seed: int = 0
    """Another seed draws other points."""
    cluster: raytf.WorkerFlags = field(default_factory=lambda: raytf.WorkerSection(use_gpu=False))


def inside(part: tuple[int, int, int]) -> int:
    """How many points of a part lie in the circle; of (seed, number of the part, points)."""
    import numpy as np

    seed, number, samples = part
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence((seed, number))))
    hits = 0
    for begin in range(0, samples, 1 << 17):  # what fits into a processor's cache
        x, y = random.random((2, min(1 << 17, samples - begin)))
        hits += int(np.count_nonzero(x * x + y * y < 1))
    return hits


def main(job: Job) -> None:
    import math

    if job.samples < 1 or job.samples_per_part < 1 or job.seed < 0:
        raise raytf.ConfigError("--samples and --samples-per-part: expected 1 or more; --seed: 0 or more.")
    # Small parts first, each as large as all before it: so the table has a line for each doubling.
    sizes, total = [min(1024, job.samples)], min(1024, job.samples)
    while total < job.samples:
        sizes.append(min(total, job.samples_per_part, job.samples - total))
        total += sizes[-1]
    hits = raytf.on_workers(inside, [(job.seed, i, n) for i, n in enumerate(sizes)], workers=job.cluster)
    print(f"{'n':>16}  {'estimate':>12}  {'error':>12}  {'error * sqrt(n)':>15}")
    n = inside_so_far = 0
    next_line = 1024
    for size, count in zip(sizes, hits, strict=True):
        n, inside_so_far = n + size, inside_so_far + count
        if n >= next_line or n == job.samples:
            estimate = 4 * inside_so_far / n
            error = abs(estimate - math.pi)
            print(f"{n:>16,}  {estimate:>12.8f}  {error:>12.8f}  {error * math.sqrt(n):>15.2f}")
            next_line = 4 * n
    print(f"pi: {4 * inside_so_far / n!r} from {inside_so_far} of {n} points")


if __name__ == "__main__":
    raytf.cli(main)
