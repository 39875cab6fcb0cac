"""`make bench`: prints every table, or those named (`kfac`), with sizes, repeats, threads and device."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console

from benchmarks import (
    accelerator,
    ang,
    conversions,
    densities,
    engine,
    ground_states,
    iterative,
    kfac,
    learning,
    policy_races,
    posteriors,
    preconditioners,
    products,
    public_scripts,
    residuals,
    scores,
    search_bits,
    search_landscapes,
    search_pbo,
    step,
    training,
    wake_sleep,
)
from natgrad_lab.data import DataError
from natgrad_lab.experiments import Interrupted, LabError

COSTS = ("time / gradient", "memory / gradient")


Rows = Iterable[tuple[str, ...]]
Shown = tuple[str, Rows, tuple[str, ...]]  # title, rows, heads of a table


@dataclass(frozen=True)
class ChosenTables:
    """What the command line says."""

    repeats: int
    seeds: range | None  # None: as many as the table usually takes
    workloads: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    redo: tuple[str, ...] = ()
    steps: int | None = None
    seconds: float | None = None
    constant: bool = False

    def over(self, usual: range) -> tuple[range, str]:
        """The seeds, and the same in words."""
        seeds = self.seeds or usual
        return seeds, f"seeds {seeds[0]} to {seeds[-1]}"


def table(title: str, rows: Sequence[tuple[str, ...]], heads: tuple[str, ...]) -> None:
    print(f"\n{title}")
    widths = [max(len(row[i]) for row in [("", *heads), *rows]) for i in range(len(heads) + 1)]
    for row in [("", *heads), *rows]:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def stream(title: str, rows: Iterable[tuple[str, ...]], heads: tuple[str, ...]) -> None:
    """A table whose rows take long: each is printed when it is there."""
    print(f"\n{title}\n  {'':<48}" + " | ".join(heads), flush=True)
    for name, *cells in rows:
        print(f"  {name:<48}" + " | ".join(cells), flush=True)


def product_tables(repeats: int) -> Iterator[Shown]:
    for work in (products.mlp(), products.cnn()):
        yield f"{work.name}, batch {len(work.inputs)}", products.report(work, repeats), COSTS


def solve_tables(repeats: int) -> Iterator[Shown]:
    yield "Residual net 2-64-64-1, 1000 rows: one damped solve", products.report_solves(repeats), COSTS


def step_tables(repeats: int) -> Iterator[Shown]:
    for setting in products.settings():
        title = f"{setting.work.name}, batch {len(setting.work.inputs)}: one step with {products.PRODUCTS} CG steps"
        yield title, products.report_steps(setting, repeats), products.HEADS


def iterative_table(repeats: int) -> Iterator[Shown]:
    heads = ("MinresQLP", "SciPy minres", "CG", "SciPy cg")
    yield "Products (and time) to |r| <= 1e-8 |b|, n = 1000, float64", iterative.report(), heads


def preconditioner_table(repeats: int) -> Iterator[Shown]:
    heads = tuple(f"after {moment} steps" for moment in preconditioners.MOMENTS)
    yield "CG's products to |r| <= .01 |g| on the digits autoencoder", preconditioners.report(), heads


def kfac_tables(repeats: int) -> Iterator[Shown]:
    for work in training.trainings():
        cycles = max(3, repeats // 4)
        title = f"{work.name}, batch {len(work.inputs)}: one step, from {cycles} cycles of {kfac.CYCLE}"
        yield title, kfac.report(work, cycles), kfac.HEADS
    yield "classifier: EKFAC's parts", kfac.report_eigen(repeats), kfac.EIGEN_HEADS
    yield "classifier: growth of the highest resident memory", kfac.memory_report(), ("MiB",)


def accelerator_table(repeats: int) -> Iterator[Shown]:
    yield "A step of a GPT with twelve layers", accelerator.report(), accelerator.HEADS


def engine_table(repeats: int) -> Iterator[Shown]:
    yield "Files and functions of natgrad that a step enters", engine.report(), engine.HEADS


def first_steps_tables(repeats: int) -> Iterator[Shown]:
    for work in training.trainings():
        title = f"{work.name}, batch {len(work.inputs)}: the first steps of a run"
        yield title, kfac.first_steps(work), kfac.FIRST_HEADS


def learning_table(repeats: int) -> Iterator[Shown]:
    if "NATGRAD_DATA" not in os.environ:
        print("\nFashion-MNIST: left out, set NATGRAD_DATA to the folder with the data")
        return
    yield "Fashion-MNIST, 784-1000-500-250-10, batch 512, three seeds", learning.report(), learning.HEADS


def policy_table(repeats: int) -> Iterator[Shown]:
    from benchmarks import policy  # needs gymnasium and sb3-contrib, which no other table does

    yield "One update of TRPO, collecting and learning", policy.report(max(5, repeats // 2)), policy.HEADS


def score_tables(repeats: int) -> Iterator[Shown]:
    yield "The exact score matching loss and its gradient", scores.layered_report(repeats), scores.LAYERED_HEADS
    title = f"One step in the score metric, {scores.VARIABLES} variables, batch {scores.EXAMPLES}"
    yield title, scores.report(), scores.HEADS


def conversion_table(repeats: int) -> Iterator[Shown]:
    title = f"{conversions.BATCH} normals, milliseconds of CPU time (quartiles)"
    yield title, conversions.report(repeats), conversions.HEADS


def wake_sleep_table(repeats: int) -> Iterator[Shown]:
    cycles = max(3, repeats // 4)
    title = f"One step of reweighted wake-sleep, 5 draws, from {cycles} cycles of {wake_sleep.CYCLE}"
    yield title, wake_sleep.report(cycles), wake_sleep.HEADS


def ang_table(choices: ChosenTables) -> Iterator[Shown]:
    title = f"Held-out loss after {ang.STEPS} steps of {ang.BATCH} rows; kept in {ang.KNOWN}"
    yield title, ang.figures(), ang.HEADS


def search_functions(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search  # needs cma, which no other table does

    seeds, words = choices.over(range(10))
    title = f"Evaluations to 1e-8, {words}"
    yield title, search.figures(seeds), search.HEADS
    yield f"{title}, XNES", search.natural_figures(seeds), (*search.HEADS[:2], "cmaes.XNES")


def race_bbob(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_bbob  # needs cma and ioh

    seeds, words = choices.over(range(1, 3))
    title = f"BBOB, 2000 d evaluations, instances {words}; kept in {search_bbob.KNOWN}"
    yield title, search_bbob.figures(seeds), search_bbob.HEADS


def race_mixed(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_coco  # needs cma and coco-experiment

    seeds, words = choices.over(range(1, 4))
    title = f"bbob-mixint, {search_coco.MIXED_BUDGET} d evaluations, instances {words}; kept in {search_coco.KNOWN}"
    yield title, search_coco.mixed_figures(seeds), search_coco.MIXED_HEADS


def race_large(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_coco  # needs cma and coco-experiment

    seeds, words = choices.over(range(1, 2))
    title = f"bbob-largescale, {search_coco.LARGE_BUDGET} d evaluations, instances {words}; kept in {search_coco.KNOWN}"
    yield title, search_coco.large_figures(seeds), search_coco.LARGE_HEADS


def search_surrogate(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search  # needs cma

    seeds, words = choices.over(range(10))
    title = f"Evaluations to 1e-8 with a quadratic model, {words}; kept in {search.KNOWN}"
    yield title, search.surrogate_figures(seeds), search.SURROGATE_HEADS


def search_bbob(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search  # needs cma

    cases = tuple((f, 5) for f in (1, 2, 8, 10, 15)) + tuple((f, 20) for f in (1, 2, 8, 10))
    seeds, words = choices.over(range(10))
    title = f"BBOB to 1e-8 in 5-d and 20-d, {words}; f15 with BIPOP, others begun again where they end"
    yield title, search.bbob_figures(seeds, cases), search.BBOB_HEADS


def race_bits(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(10))
    yield f"Bits and categories, {words}", search_bits.figures(seeds), search_bits.HEADS


def race_pbo(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(10))
    title = f"{search_pbo.BITS} bits, {search_pbo.BUDGET} evaluations, {words}; kept in {search_pbo.KNOWN}"
    yield title, search_pbo.figures(seeds), search_pbo.HEADS


def race_landscapes(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(10))
    title = f"{search_landscapes.BUDGET} evaluations, {words}; kept in {search_landscapes.KNOWN}"
    yield title, search_landscapes.figures(seeds), search_landscapes.HEADS


def search_noise(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_noise  # needs cma

    seeds, words = choices.over(range(10))
    title = f"10-d, noise of deviation 1, {search_noise.BUDGET} evaluations, {words}"
    yield title, search_noise.figures(seeds), search_noise.HEADS


def search_cost(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_costs  # needs cma

    rows = search_costs.overheads(max(3, choices.repeats // 3))
    yield "One generation of ask and tell", rows, search_costs.HEADS
    yield "Memory and time of a generation", search_costs.memory(), search_costs.MEMORY_HEADS


def residual_races(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(5))
    title = f"Relative error, {words}: median (least to largest) at equal CPU seconds of one thread, float64"
    yield title, residuals.report(seeds, choices.workloads, choices.seconds, choices.methods), residuals.HEADS


def race_ground_states(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(5))
    rows = ground_states.report(seeds, choices.workloads, choices.seconds, choices.methods)
    title = f"Relative error of the energy, {words}: median (least to largest) at equal CPU seconds"
    yield title, rows, ground_states.HEADS


def race_policies(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(5))
    rows = policy_races.figures(seeds, choices.workloads, choices.methods, choices.steps or 100_000)
    yield f"Returns, {words}, mean ± standard deviation; kept in {policy_races.KNOWN}", rows, policy_races.HEADS


def race_posteriors(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(3))
    title = f"A normal q, {words}, CPU seconds of one thread; kept in {posteriors.KNOWN}"
    yield title, posteriors.figures(seeds, choices.seconds), posteriors.HEADS


def race_densities(choices: ChosenTables) -> Iterator[Shown]:
    seeds, words = choices.over(range(3))
    title = f"log p(x), {choices.steps or densities.STEPS} steps of {densities.BATCH} examples, {words}"
    yield title, densities.report(seeds, choices.steps, choices.workloads), densities.HEADS


def step_races(choices: ChosenTables) -> Iterator[Shown]:
    request = step.Request(
        choices.workloads,
        choices.methods or step.Request.methods,
        choices.steps,
        choices.seconds,
        3 if choices.seeds is None else len(choices.seeds),
        falls=not choices.constant,
        redo=choices.redo,
    )
    try:
        step.carry_out(request, Console())
    except Interrupted as error:
        raise SystemExit("stopped; the same command goes on from here") from error
    except (LabError, DataError) as error:
        raise SystemExit(str(error)) from error
    yield from ()  # it prints its tables itself


TABLES: dict[str, Callable[[int], Iterator[Shown]]] = {
    "products": product_tables,
    "solves": solve_tables,
    "steps": step_tables,
    "iterative": iterative_table,
    "preconditioners": preconditioner_table,
    "kfac": kfac_tables,
    "accelerator": accelerator_table,
    "engine": engine_table,
    "first-steps": first_steps_tables,
    "learning": learning_table,
    "scores": score_tables,
    "conversions": conversion_table,
    "policy": policy_table,
    "wake-sleep": wake_sleep_table,
}

SEARCHES: dict[str, Callable[[ChosenTables], Iterator[Shown]]] = {
    "search-functions": search_functions,
    "search-bbob": search_bbob,
    "search-bbob-large": race_bbob,
    "search-mixint": race_mixed,
    "search-640": race_large,
    "search-surrogate": search_surrogate,
    "search-bits": race_bits,
    "search-pbo": race_pbo,
    "search-landscapes": race_landscapes,
    "search-noise": search_noise,
    "search-cost": search_cost,
}


STREAMS = {"ang": ang_table}
RACES: dict[str, Callable[[ChosenTables], Iterator[Shown]]] = {
    "step": step_races,
    "scripts": public_scripts.race_scripts,
    "densities": race_densities,
    "residuals": residual_races,
    "ground-states": race_ground_states,
    "posteriors": race_posteriors,
    "policy-races": race_policies,
}
"""Minutes to hours: only where they are named."""


def as_words(text: str) -> tuple[str, ...]:
    """`char,vit` as two words."""
    return tuple(text.split(","))


def as_seeds(text: str) -> range:
    """`10` for 0 to 9, `10:30` for 10 to 29."""
    first, last = text.split(":") if ":" in text else ("0", text)
    return range(int(first), int(last))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*TABLES, *STREAMS, "search", *SEARCHES, *RACES]
    tables = f"of {', '.join(names)}; all but step by default; search is all search-..."
    parser.add_argument("tables", nargs="*", help=tables)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seeds", type=as_seeds, help="of searches: 10, or 10:30 [10]; of step: how many [3]")
    parser.add_argument(
        "--workloads", type=as_words, default=(), help="of step: char,vit, or the suites chosen,judged [all]"
    )
    parser.add_argument("--methods", type=as_words, default=(), help="of step [kfac,adam,muon,soap,sgd]")
    parser.add_argument("--redo", type=as_words, default=(), help="of step: whose finished runs are thrown away")
    parser.add_argument("--steps", type=int, help="of step: one race of that many [each workload's own]")
    parser.add_argument("--seconds", type=float, help="of step: one race of that many CPU seconds")
    parser.add_argument("--constant", action="store_true", help="of step: rates that do not fall")
    parser.add_argument("--threads", type=int, default=1)
    choices = parser.parse_args()
    unknown = set(choices.tables) - set(names)
    if unknown:
        parser.error(f"tables {sorted(unknown)} are not known, expected some of {', '.join(names)}")
    torch.set_num_threads(choices.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {choices.threads} thread(s), float32, CPU {platform.machine()}, medians of "
        f"{choices.repeats} interleaved repeats (quartiles of the paired ratios)"
    )
    asked = ChosenTables(
        choices.repeats,
        choices.seeds,
        choices.workloads,
        choices.methods,
        choices.redo,
        choices.steps,
        choices.seconds,
        choices.constant,
    )
    for name in choices.tables or [*TABLES, *STREAMS, "search"]:
        if name in TABLES:
            for shown in TABLES[name](choices.repeats):
                table(*shown)
            continue
        for part in SEARCHES if name == "search" else [name]:
            for shown in (STREAMS | SEARCHES | RACES)[part](asked):
                stream(*shown)


if __name__ == "__main__":
    main()
