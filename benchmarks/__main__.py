"""`make bench`: prints every table, with sizes, repeats, threads and device."""

from __future__ import annotations

import argparse
import platform

import torch

from benchmarks import products, solves


def table(title: str, rows: list[tuple[str, str, str]]) -> None:
    print(f"\n{title}")
    width = max(len(row[0]) for row in rows)
    print(f"  {'':<{width}}  {'time / gradient':<18}  memory / gradient")
    for name, seconds, memory in rows:
        print(f"  {name:<{width}}  {seconds:<18}  {memory}")


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
        table(f"{work.name}, batch {len(work.inputs)}", products.report(work, choices.repeats))
    table("Residual net 2-64-64-1, 1000 rows: one damped solve", solves.report(choices.repeats))


if __name__ == "__main__":
    main()
