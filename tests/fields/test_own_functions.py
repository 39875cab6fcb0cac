"""Functions that a user gives are asked in the shapes that their docstring promises, and in no other that counts."""

from __future__ import annotations

import pytest
import torch
from models import draw
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.residuals import HardConstraint
from natgrad.search import Repeated

F64 = torch.float64
NORMAL, FULL = ng.Normal(), ng.MultivariateNormal(2)


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=F64)


def require_shape(x: Tensor, *sizes: int | None) -> None:
    fits = x.dim() == len(sizes) and all(size in (None, came) for size, came in zip(sizes, x.shape, strict=True))
    assert fits, f"asked with {tuple(x.shape)}, promised {sizes}"


def mean_std(xi: Tensor) -> Tensor:
    require_shape(xi, 2)
    return NORMAL.from_mean_std(xi[0], xi[1])


def mean_std_of(theta: Tensor) -> Tensor:
    require_shape(theta, 2)
    return torch.stack(NORMAL.mean_std(theta))


@pytest.mark.parametrize("of", [None, mean_std_of])
def test_a_map_of_one_point_has_the_fisher_matrix_of_its_jacobian(of):
    """diag(1, 2) / std^2 in mean and standard deviation; products, columns, inverse and natural gradient agree."""
    operator = ng.families.fisher_in(NORMAL, mean_std, tensor(0.3, 0.7), of)
    expected = torch.diag(tensor(1.0, 2.0)) / 0.49
    assert_close(operator.dense(), expected)
    assert_close(operator.mm(torch.eye(2, dtype=F64)), expected)
    assert_close(torch.stack([operator @ row for row in torch.eye(2, dtype=F64)]), expected)
    assert_close(operator.diagonal(), expected.diagonal())
    assert_close(ng.natural_gradient(operator, tensor(1.0, 1.0)).value, 0.49 * tensor(1.0, 0.5))
    assert (operator.inverse(0.0) is None) == (of is None)
    if of is not None:
        assert_close(operator.inverse(0.0).dense(), expected.inverse())


@pytest.mark.parametrize("d", [1, 2, 3])
@pytest.mark.parametrize("rows", [False, True], ids=["one z", "rows"])
def test_a_log_joint_of_one_z_or_of_rows(rows, d):
    """One that checks its argument by an assert is tried in the other way, as one that fails by an index is."""

    def log_joint(z: Tensor) -> Tensor:
        require_shape(z, *((None, d) if rows else (d,)))
        return -((z.movedim(-1, 0)[0] - 1) ** 2) / 2 - (z**2).sum(-1) / 2

    q = ng.variational(log_joint, d)
    assert q.fit(10).converged
    assert_close(q.mean, tensor(0.5, *[0.0] * (d - 1)), rtol=0, atol=1e-6)
    ng.variational_low_rank(log_joint, d, rank=1).fit(1)
    ng.variational_mixture(log_joint, draw(2, d)).fit(1)


def test_a_constraint_of_points():
    """Alone, in a term that is taken layer by layer, and in one that is not."""

    def distance(x: Tensor) -> Tensor:
        require_shape(x, None, 2)
        return x[:, :1] * (1 - x[:, :1])

    net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    u, x = HardConstraint(net, distance, lambda x: x[:, 1:]), tensor(0.2, 0.7)
    assert_close(u(x), u(x.unsqueeze(0))[0])
    assert ng.laplacian(u, x).shape == (1,)
    terms = {"inside": lambda u, x: ng.laplacian(u, x) - 1, "odd": lambda u, x: ng.grad(u, x).sum() * u(x + 0.1).norm()}
    ng.residuals(u, terms).step(inside=draw(4, 2), odd=draw(3, 2))


@pytest.mark.parametrize("d", [2, 4, 6])  # 6 is the size of a generation of two variables
@pytest.mark.parametrize("rows", [False, True], ids=["a point", "rows"])
def test_a_black_box_of_one_point_or_of_rows(rows, d):
    def f(x: Tensor) -> Tensor:
        require_shape(x, *((None, d) if rows else (d,)))
        return (x.movedim(-1, 0)[0] - 1) ** 2 + (x**2).sum(-1)

    found = ng.minimize(f, torch.zeros(d, dtype=F64), 1.0, maxfevals=60, seed=0)
    assert found.failures <= (1 if rows else 100)
    x = draw(d, d)
    assert_close(Repeated(f)(x), (x[:, 0] - 1) ** 2 + (x**2).sum(1))


def test_functions_of_families():
    def product(x: Tensor) -> Tensor:
        assert x.shape[-1] == 2
        return x[..., 0] * x[..., 1]

    def values(x: Tensor) -> Tensor:
        require_shape(x, None, 3)
        return x[:, 0] + x[:, 1] * x[:, 2]

    def divergence(points: Tensor) -> Tensor:
        require_shape(points, None, 2)
        return points[:, 0] ** 2 + 4 * points[:, 1] ** 2

    field = ng.families.MarkovField([(0, 1, 2), (0, 1)], [((0, 1), product), ((0,), lambda x: x[..., 0])])
    assert field.sample(tensor(0.1, 0.2), 3).shape == (3, 2)
    found = ng.families.exact_natural_gradient_of_mean(ng.Bernoulli(3), torch.zeros(3, dtype=F64), values)
    assert_close(found, tensor(1.0, 0.5, 0.5))
    edge = ng.geometry.level_set(divergence, torch.zeros(2, dtype=F64), 1.0, 5)
    assert_close(divergence(edge), torch.ones(5, dtype=F64))
