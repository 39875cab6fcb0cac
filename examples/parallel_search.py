"""A black box evaluated by two workers: python examples/parallel_search.py [dask | ray | mpi]

MPI: mpiexec -n 3 python -m mpi4py.futures examples/parallel_search.py mpi
"""

import sys
from concurrent.futures import ProcessPoolExecutor

import torch
from sklearn.datasets import load_digits
from sklearn.svm import SVC

import natgrad as ng

x, y = load_digits(return_X_y=True)


def validation_error(point: torch.Tensor) -> float:
    """Of a support vector machine on 200 digits, by log10 of its C and gamma."""
    machine = SVC(C=10 ** float(point[0]), gamma=10 ** float(point[1])).fit(x[:200] / 16, y[:200])
    return 1 - machine.score(x[200:500] / 16, y[200:500])


def open_pool(kind: str):
    if kind == "dask":
        from dask.distributed import Client

        return Client(n_workers=2, threads_per_worker=1)
    if kind == "mpi":
        from mpi4py.futures import MPIPoolExecutor

        return MPIPoolExecutor()
    return ng.search.RayPool() if kind == "ray" else ProcessPoolExecutor(2)


if __name__ == "__main__":
    pool = open_pool(*sys.argv[1:] or ["processes"])
    found = ng.minimize(validation_error, torch.zeros(2), 1.0, maxfevals=60, seed=0, executor=pool, ahead=2)
    print(f"{type(pool).__name__}: error {found.fun:.3f} with C {10 ** found.x[0]:.2g}, gamma {10 ** found.x[1]:.2g}")
