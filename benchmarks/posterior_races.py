"""The race of posteriors: a row per problem and contestant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.kept_results import keep_result
from benchmarks.posterior_contestants import contestants
from benchmarks.posteriors import PROBLEMS, Posterior, Steps, reach

KNOWN = Path("build/benchmarks/posteriors.json")
HEADS = ("to .01 nats of the best bound, CPU seconds: median (least to largest)", "settings")


def figures(seeds: range, seconds: float | None) -> Iterator[tuple[str, ...]]:
    """A row per problem and contestant: each has as many settings as it has knobs, of which the fastest counts."""
    limit = seconds or 15.0
    for name, build in PROBLEMS.items():
        problem = build()
        best = problem.best()
        yield f"{name}: best bound {best:.3f}", "", ""
        for title, settings in contestants(problem).items():
            found = keep_result(
                KNOWN,
                f"{name} {title} {seeds} {limit}",
                lambda s=settings, p=problem, b=best: fastest(s, p, b, seeds, limit),
            )
            yield title, found[0], found[1]


def fastest(
    settings: dict[str, Callable[[Posterior, int], Steps]], problem: Posterior, best: float, seeds: range, limit: float
) -> tuple[str, str]:
    """The setting that is fastest on the first seed, on all of them. One that is slower than the best so far stops."""
    least, chosen, lacks = limit, "", []
    for name, start in settings.items():
        warm = start(problem, 0)
        for _ in range(2):
            next(warm, None)  # compilers, caches and first calls are nobody's time
        took, lack = reach(start(problem, seeds[0]), problem, best, least)
        lacks.append(lack)
        if took < least:
            least, chosen = took, name
    if not chosen:
        return f"not in {limit:g} s, lacks {min(lacks):.2g} nats", f"{len(settings)} tried"
    took = sorted(reach(settings[chosen](problem, seed), problem, best, limit)[0] for seed in seeds)
    return f"{took[len(took) // 2]:.3g} ({took[0]:.3g}-{took[-1]:.3g})", f"{chosen}; {len(settings)} tried"
