"""`make bench`: prints every table, with sizes, repeats, threads and device."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence

import torch

from benchmarks import iterative, preconditioners, products, solves, steps

COSTS = ("time / gradient", "memory / gradient")


def table(title: str, rows: Sequence[tuple[str, ...]], heads: tuple[str, ...]) -> None:
    print(f"\n{title}")
    widths = [max(len(row[i]) for row in [("", *heads), *rows]) for i in range(len(heads) + 1)]
    for row in [("", *heads), *rows]:
        print("  " + "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--threads", type=int, default=1)
    choices = parser.parse_args()
    torch.set_num_threads(choices.threads)
    torch.manual_seed(0)
    print(
        f"torch {torch.__version__}, {choices.threads} thread(s), float32, CPU {platform.machine()}, medians of "
        f"{choices.repeats} interleaved repeats (quartiles of the paired ratios)"
    )
    for work in (products.mlp(), products.cnn()):
        table(f"{work.name}, batch {len(work.inputs)}", products.report(work, choices.repeats), COSTS)
    table("Residual net 2-64-64-1, 1000 rows: one damped solve", solves.report(choices.repeats), COSTS)
    for setting in steps.settings():
        title = f"{setting.work.name}, batch {len(setting.work.inputs)}: one step with {steps.PRODUCTS} CG steps"
        table(title, steps.report(setting, choices.repeats), steps.HEADS)
    heads = ("MinresQLP", "SciPy minres", "CG", "SciPy cg")
    table("Products (and time) to |r| <= 1e-8 |b|, n = 1000, float64", iterative.report(), heads)
    heads = tuple(f"after {moment} steps" for moment in preconditioners.MOMENTS)
    table("CG's products to |r| <= .01 |g| on the digits autoencoder", preconditioners.report(), heads)


if __name__ == "__main__":
    main()
