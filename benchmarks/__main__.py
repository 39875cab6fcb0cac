"""`make bench`: prints every table, or those named (`kfac`), with sizes, repeats, threads and device."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator

import torch

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
    search_problems,
    step,
    training,
    wake_sleep,
)
from benchmarks.tables import ChosenTables, Shown, Table, print_table, stream
from natgrad_lab.data import DataError
from natgrad_lab.experiments import Interrupted, LabError

COSTS = ("time / gradient", "memory / gradient")


def product_tables(choices: ChosenTables) -> Iterator[Shown]:
    for work in (products.mlp(), products.cnn()):
        yield f"{work.name}, batch {len(work.inputs)}", products.report(work, choices.repeats), COSTS


def step_tables(choices: ChosenTables) -> Iterator[Shown]:
    for work in (products.mlp(), products.cnn(), products.autoencoder()):
        title = f"{work.name}, batch {len(work.inputs)}: one step with {products.PRODUCTS} CG steps"
        yield title, products.report_steps(work, choices.repeats), products.HEADS


def kfac_tables(choices: ChosenTables) -> Iterator[Shown]:
    for work in training.trainings():
        title = f"{work.name}, batch {len(work.inputs)}: one step, from {choices.cycles} cycles of {kfac.CYCLE}"
        yield title, kfac.report(work, choices.cycles), kfac.HEADS
    yield "classifier: EKFAC's parts", kfac.report_eigen(choices.repeats), kfac.EIGEN_HEADS
    yield "classifier: growth of the highest resident memory", kfac.memory_report(), ("MiB",)


def first_steps_tables(choices: ChosenTables) -> Iterator[Shown]:
    for work in training.trainings():
        title = f"{work.name}, batch {len(work.inputs)}: the first steps of a run"
        yield title, kfac.first_steps(work), kfac.FIRST_HEADS


def learning_table(choices: ChosenTables) -> Iterator[Shown]:
    if "NATGRAD_DATA" not in os.environ:
        print("\nFashion-MNIST: left out, set NATGRAD_DATA to the folder with the data")
        return
    yield "Fashion-MNIST, 784-1000-500-250-10, batch 512, three seeds", learning.report(), learning.HEADS


def policy_table(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import policy  # needs gymnasium and sb3-contrib, which no other table does

    yield "One update of TRPO, collecting and learning", policy.report(max(5, choices.repeats // 2)), policy.HEADS


def score_tables(choices: ChosenTables) -> Iterator[Shown]:
    layered = scores.layered_report(choices.repeats)
    yield "The exact score matching loss and its gradient", layered, scores.LAYERED_HEADS
    title = f"One step in the score metric, {scores.VARIABLES} variables, batch {scores.EXAMPLES}"
    yield title, scores.report(), scores.HEADS


def search_functions(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search  # needs cma

    yield choices.show("Evaluations to 1e-8, {}", range(10), search.figures, search.HEADS)
    heads = (*search.HEADS[:2], "cmaes.XNES")
    yield choices.show("Evaluations to 1e-8, {}, XNES", range(10), search.natural_figures, heads)


def search_bbob(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search  # needs cma

    cases = tuple((f, 5) for f in (1, 2, 8, 10, 15)) + tuple((f, 20) for f in (1, 2, 8, 10))
    title = "BBOB to 1e-8 in 5-d and 20-d, {}; f15 with BIPOP, others begun again where they end"
    yield choices.show(title, range(10), lambda seeds: search.bbob_figures(seeds, cases), search.BBOB_HEADS)


def search_surrogate(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search  # needs cma

    title = f"Evaluations to 1e-8 with a quadratic model, {{}}; kept in {search.KNOWN}"
    yield choices.show(title, range(10), search.surrogate_figures, search.SURROGATE_HEADS)


def race_bbob(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_bbob  # needs cma and ioh

    title = f"BBOB, 2000 d evaluations, instances {{}}; kept in {search_bbob.KNOWN}"
    yield choices.show(title, range(1, 3), search_bbob.figures, search_bbob.HEADS)


def race_mixed(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_coco as coco  # needs cma and coco-experiment

    title = f"bbob-mixint, {coco.MIXED_BUDGET} d evaluations, instances {{}}; kept in {coco.KNOWN}"
    yield choices.show(title, range(1, 4), coco.mixed_figures, coco.MIXED_HEADS)


def race_large(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_coco as coco  # needs cma and coco-experiment

    title = f"bbob-largescale, {coco.LARGE_BUDGET} d evaluations, instances {{}}; kept in {coco.KNOWN}"
    yield choices.show(title, range(1, 2), coco.large_figures, coco.LARGE_HEADS)


def search_noise(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_noise  # needs cma

    title = f"10-d, noise of deviation 1, {search_noise.BUDGET} evaluations, {{}}"
    yield choices.show(title, range(10), search_noise.figures, search_noise.HEADS)


def search_cost(choices: ChosenTables) -> Iterator[Shown]:
    from benchmarks import search_costs  # needs cma

    rows = search_costs.overheads(max(3, choices.repeats // 3))
    yield "One generation of ask and tell", rows, search_costs.HEADS
    yield "Memory and time of a generation", search_costs.memory(), search_costs.MEMORY_HEADS


def race_densities(choices: ChosenTables) -> Iterator[Shown]:
    title = f"log p(x), {choices.steps or densities.STEPS} steps of {densities.BATCH} examples, {{}}"
    asked = choices.steps, choices.workloads
    yield choices.show(title, range(3), lambda seeds: densities.report(seeds, *asked), densities.HEADS)


def race_steps(choices: ChosenTables) -> Iterator[Shown]:
    try:
        step.carry_out(choices)
    except Interrupted as error:
        raise SystemExit("stopped; the same command goes on from here") from error
    except (LabError, DataError) as error:
        raise SystemExit(str(error)) from error
    yield from ()  # it prints its tables itself


TABLES: dict[str, Table] = {
    "products": product_tables,
    "solves": lambda choices: [
        ("Residual net 2-64-64-1, 1000 rows: one damped solve", products.report_solves(choices.repeats), COSTS)
    ],
    "steps": step_tables,
    "iterative": lambda choices: [
        ("Products (and time) to |r| <= 1e-8 |b|, n = 1000, float64", iterative.report(), iterative.HEADS)
    ],
    "preconditioners": lambda choices: [
        ("CG's products to |r| <= .01 |g| on the digits autoencoder", preconditioners.report(), preconditioners.HEADS)
    ],
    "kfac": kfac_tables,
    "accelerator": lambda choices: [
        ("A step of a GPT with twelve layers", accelerator.report(), accelerator.HEADS),
    ],
    "engine": lambda choices: [("Files and functions of natgrad that a step enters", engine.report(), engine.HEADS)],
    "first-steps": first_steps_tables,
    "learning": learning_table,
    "derivatives": lambda choices: [
        (residuals.DERIVATIVES_TITLE, residuals.time_derivatives(choices.repeats), residuals.DERIVATIVES_HEADS)
    ],
    "scores": score_tables,
    "conversions": lambda choices: [(conversions.TITLE, conversions.report(choices.repeats), conversions.HEADS)],
    "policy": policy_table,
    "wake-sleep": lambda choices: [
        (wake_sleep.TITLE.format(choices.cycles), wake_sleep.report(choices.cycles), wake_sleep.HEADS)
    ],
}
SEARCHES: dict[str, Table] = {
    "search-functions": search_functions,
    "search-bbob": search_bbob,
    "search-bbob-large": race_bbob,
    "search-mixint": race_mixed,
    "search-640": race_large,
    "search-draws": lambda choices: [
        choices.show("Evaluations to 1e-8, {}", range(5), search_problems.compare_draws, search_problems.DRAWS_HEADS)
    ],
    "search-surrogate": search_surrogate,
    "search-bits": lambda choices: [
        choices.show("Bits and categories, {}", range(10), search_bits.figures, search_bits.HEADS)
    ],
    "search-pbo": lambda choices: [choices.show(search_pbo.TITLE, range(10), search_pbo.figures, search_pbo.HEADS)],
    "search-landscapes": lambda choices: [
        choices.show(search_landscapes.TITLE, range(10), search_landscapes.figures, search_landscapes.HEADS)
    ],
    "search-noise": search_noise,
    "search-cost": search_cost,
}
STREAMS: dict[str, Table] = {
    "ang": lambda choices: [
        (f"Held-out loss after {ang.STEPS} steps of {ang.BATCH} rows; kept in {ang.KNOWN}", ang.figures(), ang.HEADS)
    ]
}
RACES: dict[str, Table] = {  # minutes to hours: only where they are named
    "step": race_steps,
    "scripts": public_scripts.race_scripts,
    "densities": race_densities,
    "residuals": lambda choices: [choices.race(range(5), residuals)],
    "ground-states": lambda choices: [choices.race(range(5), ground_states)],
    "posteriors": lambda choices: [choices.race(range(3), posteriors)],
    "policy-races": lambda choices: [choices.race(range(5), policy_races)],
}


def as_words(text: str) -> tuple[str, ...]:
    """`char,vit` as two words."""
    return tuple(text.split(","))


def as_seeds(text: str) -> range:
    """`10` for 0 to 9, `10:30` for 10 to 29."""
    first, last = text.split(":") if ":" in text else ("0", text)
    seeds = range(int(first), int(last))
    if not seeds or seeds[0] < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed, expected 10 for 0 to 9, or 10:30 for 10 to 29")
    return seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*TABLES, *STREAMS, "search", *SEARCHES, *RACES]
    races = f"{', '.join(RACES)} are races and run only where they are named"
    tables = f"of {', '.join(names)}; {races}; search is all search-..."
    parser.add_argument("tables", nargs="*", help=tables)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--seeds", type=as_seeds, help="of searches and races: 10, or 10:30; of step: how many [3]")
    parser.add_argument(
        "--workloads", type=as_words, default=(), help="of races; of step: char,vit, or suites chosen,judged [all]"
    )
    parser.add_argument("--methods", type=as_words, default=(), help="of races; of step [kfac,adam,muon,soap,sgd]")
    parser.add_argument("--redo", type=as_words, default=(), help="of step: whose finished runs are thrown away")
    parser.add_argument("--steps", type=int, help="of races: of that many [each workload's own]")
    parser.add_argument("--seconds", type=float, help="of races: of that many CPU seconds")
    parser.add_argument("--constant", action="store_true", help="of step: rates that do not fall")
    parser.add_argument("--threads", type=int, default=1)
    choices = ChosenTables(**vars(parser.parse_args()))
    for name, least in (("repeats", 2), ("threads", 1), ("steps", 1)):
        number = getattr(choices, name)
        if number is not None and number < least:
            parser.error(f"--{name} is {number}, expected at least {least}")
    if choices.seconds is not None and not choices.seconds > 0:
        parser.error(f"--seconds is {choices.seconds}, expected a number above 0")
    unknown = set(choices.tables) - set(names)
    if unknown:
        parser.error(f"tables {sorted(unknown)} are not known, expected some of {', '.join(names)}")
    torch.set_num_threads(choices.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {choices.threads} thread(s), float32, CPU {platform.machine()}, medians of "
        f"{choices.repeats} interleaved repeats (quartiles of the paired ratios)"
    )
    streams = STREAMS | SEARCHES | RACES
    for name in choices.tables or [*TABLES, *STREAMS, "search"]:
        for part in SEARCHES if name == "search" else [name]:
            for shown in (TABLES | streams)[part](choices):
                (stream if part in streams else print_table)(*shown)


if __name__ == "__main__":
    main()
