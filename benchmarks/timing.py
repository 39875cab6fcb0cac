"""Interleaved timings and peak memory, in multiples of a reference."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile

Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """A median time as a multiple of the reference's, with the quartiles of the paired ratios."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


def time_in_turn(works: Mapping[str, Work], repeats: int, warm: int = 1) -> dict[str, list[float]]:
    """Processor seconds of every work: all run in turn, `repeats` times, after some rounds of warming up."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(repeats + warm):
        for name, work in works.items():
            seconds = measure_time(work)
            if round_ >= warm:
                times[name].append(seconds)
    return times


def measure_time(work: Work) -> float:
    """Processor seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratios(reference: Work, works: Mapping[str, Work], repeats: int) -> dict[str, Ratio]:
    """Every work's time over the reference's, in turn."""
    times = time_in_turn({"": reference, **works}, repeats)
    base = times.pop("")
    return {name: ratio(values, base) for name, values in times.items()}


def ratio(values: list[float], base: list[float]) -> Ratio:
    """Ratio of medians, with the quartiles of round-by-round ratios."""
    quarters = statistics.quantiles([v / b for v, b in zip(values, base, strict=True)], n=4)
    return Ratio(statistics.median(values) / statistics.median(base), quarters[0], quarters[2])


def peak_memory(work: Work) -> float:
    """Highest growth of allocated tensor memory between operations of `work()`, in MiB, by the profiler's count."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    total = peak = 0
    for event in sorted(recorded.events(), key=lambda e: e.time_range.start):
        total += event.self_cpu_memory_usage
        peak = max(peak, total)
    return peak / 2**20
