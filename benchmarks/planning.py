"""What planning costs: seconds to plan and build a pipeline beyond its sampling, and to fingerprint 10,000 files.

    python benchmarks/planning.py [RESULTS.json]

Prints the medians, and writes them with the raw samples and the environment.
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tfopt.bench.workloads import photos
from tfopt.files import write_atomic
from tfopt.measure import environment
from tfopt.pipelines import CentralCrop, RandomCrop, images, plan_pipeline
from tfopt.pipelines.cache.value_hash import hash_value
from tfopt.pipelines.inspection import facts

REPEATS = 7
FILES = 10_000


def plan_and_build(folder, **options):
    """Seconds to make the source, plan and build, without the time that the planner reads samples."""
    sampling = 0.0
    take_sample = facts.take_sample

    def timed(*arguments):
        nonlocal sampling
        started = time.perf_counter()
        try:
            return take_sample(*arguments)
        finally:
            sampling += time.perf_counter() - started

    facts.take_sample = timed
    try:
        started = time.perf_counter()
        plan_pipeline(images(folder), batch_size=32, **options).build()
        return time.perf_counter() - started - sampling
    finally:
        facts.take_sample = take_sample


def fingerprint_files(folder):
    """Seconds to fingerprint the source of a folder of images."""
    source = images(folder)
    started = time.perf_counter()
    hash_value(source.fingerprint(), name="source")
    return time.perf_counter() - started


def many_files(folder):
    """A folder of 10,000 files that begin as JPEGs do."""
    (folder / "class").mkdir()
    for number in range(FILES):
        (folder / "class" / f"{number}.jpg").write_bytes(b"\xff\xd8\xff" + bytes(100))
    return folder


def main():
    """Measures, prints and writes."""
    small = photos.folder(256)
    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as many:
        large = many_files(Path(many))
        tasks = {
            "plan and build, transform": lambda: plan_and_build(small, transform=photos.resized),
            "plan and build, random crop": lambda: plan_and_build(small, crop=RandomCrop(224), cache=None),
            "plan and build, cache on disk": lambda: plan_and_build(small, crop=CentralCrop(224), cache=caches),
            f"fingerprint {FILES:,} files": lambda: fingerprint_files(large),
        }
        samples = {name: [] for name in tasks}
        for _ in range(REPEATS):
            for name, task in tasks.items():
                samples[name].append(task())
    document = {"environment": environment(), "seconds": samples}
    for name, seconds in samples.items():
        print(f"{name}: {statistics.median(seconds):.3f} s [{min(seconds):.3f}–{max(seconds):.3f}]")
    if len(sys.argv) > 1:
        write_atomic(sys.argv[1], json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
