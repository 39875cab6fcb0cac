"""`make bench`: prints every table, or those named (`kfac`), with sizes, repeats, threads and device."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Sequence

import torch

from benchmarks import ekfac, iterative, kfac, learning, preconditioners, products, scores, solves, steps, training

COSTS = ("time / gradient", "memory / gradient")


def table(title: str, rows: Sequence[tuple[str, ...]], heads: tuple[str, ...]) -> None:
    print(f"\n{title}")
    widths = [max(len(row[i]) for row in [("", *heads), *rows]) for i in range(len(heads) + 1)]
    for row in [("", *heads), *rows]:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def product_tables(repeats: int) -> None:
    for work in (products.mlp(), products.cnn()):
        table(f"{work.name}, batch {len(work.inputs)}", products.report(work, repeats), COSTS)


def solve_tables(repeats: int) -> None:
    table("Residual net 2-64-64-1, 1000 rows: one damped solve", solves.report(repeats), COSTS)


def step_tables(repeats: int) -> None:
    for setting in steps.settings():
        title = f"{setting.work.name}, batch {len(setting.work.inputs)}: one step with {steps.PRODUCTS} CG steps"
        table(title, steps.report(setting, repeats), steps.HEADS)


def iterative_table(repeats: int) -> None:
    heads = ("MinresQLP", "SciPy minres", "CG", "SciPy cg")
    table("Products (and time) to |r| <= 1e-8 |b|, n = 1000, float64", iterative.report(), heads)


def preconditioner_table(repeats: int) -> None:
    heads = tuple(f"after {moment} steps" for moment in preconditioners.MOMENTS)
    table("CG's products to |r| <= .01 |g| on the digits autoencoder", preconditioners.report(), heads)


def kfac_tables(repeats: int) -> None:
    for work in training.trainings():
        cycles = max(3, repeats // 4)
        title = f"{work.name}, batch {len(work.inputs)}: one step, from {cycles} cycles of {kfac.CYCLE}"
        table(title, kfac.report(work, cycles), kfac.HEADS)
    table("classifier: EKFAC's parts", ekfac.report(repeats), ekfac.HEADS)
    table("classifier: growth of the highest resident memory", kfac.memory_report(), ("MiB",))


def learning_table(repeats: int) -> None:
    if "NATGRAD_DATA" not in os.environ:
        print("\nFashion-MNIST: left out, set NATGRAD_DATA to the folder with the data")
        return
    table("Fashion-MNIST, 784-1000-500-250-10, batch 512, three seeds", learning.report(), learning.HEADS)


def search_tables(repeats: int) -> None:
    from benchmarks import search  # needs cma, which no other table does

    cost = [search.overhead(d, repeats=max(3, repeats // 3)) for d in (10, 100)]
    table("One generation of ask and tell", cost, ("time / pycma's",))
    table("Evaluations to 1e-8, ten seeds", search.figures(10), search.HEADS)
    cases = tuple((f, 5) for f in (1, 2, 8, 10, 15)) + tuple((f, 20) for f in (1, 2, 8, 10))
    table("BBOB to 1e-8, instances 1-10; f15 with BIPOP", search.bbob_figures(cases), search.BBOB_HEADS)
    table("Bits, ten seeds", list(search.bit_figures(10)), search.BIT_HEADS)


def policy_table(repeats: int) -> None:
    from benchmarks import policy  # needs gymnasium and sb3-contrib, which no other table does

    table("One update of TRPO, collecting and learning", policy.report(max(5, repeats // 2)), policy.HEADS)


def score_tables(repeats: int) -> None:
    table("The exact score matching loss and its gradient", scores.layered_report(repeats), scores.LAYERED_HEADS)
    title = f"One step in the score metric, {scores.VARIABLES} variables, batch {scores.EXAMPLES}"
    table(title, scores.report(), scores.HEADS)


TABLES: dict[str, Callable[[int], None]] = {
    "products": product_tables,
    "solves": solve_tables,
    "steps": step_tables,
    "iterative": iterative_table,
    "preconditioners": preconditioner_table,
    "kfac": kfac_tables,
    "learning": learning_table,
    "search": search_tables,
    "scores": score_tables,
    "policy": policy_table,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}; all by default")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    choices = parser.parse_args()
    unknown = set(choices.tables) - set(TABLES)
    if unknown:
        parser.error(f"tables {sorted(unknown)} are not known, expected some of {', '.join(TABLES)}")
    torch.set_num_threads(choices.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {choices.threads} thread(s), float32, CPU {platform.machine()}, medians of "
        f"{choices.repeats} interleaved repeats (quartiles of the paired ratios)"
    )
    for name in choices.tables or TABLES:
        TABLES[name](choices.repeats)


if __name__ == "__main__":
    main()
