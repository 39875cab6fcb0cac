"""Points on an edge: where a value is fine so is its derivative, that of the points without what is absent there."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from natgrad.families import Categorical, Exponential, Multinomial, Normal
from natgrad.geometry import Bits, Manifold, Rates, Simplex, Wasserstein, fisher_rao


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


# a manifold, two points and a tangent inside, and the entry that is added on the edge
EDGES: dict[str, tuple[Manifold, Tensor, Tensor, Tensor, float]] = {
    "classes that both lack": (Simplex(), tensor(0.3, 0.7), tensor(0.6, 0.4), tensor(0.1, -0.1), 0.0),
    "counts": (Simplex(5), tensor(0.3, 0.7), tensor(0.6, 0.4), tensor(0.1, -0.1), 0.0),
    "rates of zero": (Rates(), tensor(0.3, 2.0), tensor(0.6, 0.4), tensor(0.1, -0.1), 0.0),
    "bits that never come": (Bits(), tensor(0.3, 0.8), tensor(0.6, 0.4), tensor(0.1, -0.1), 0.0),
    "bits that always come": (Bits(), tensor(0.3, 0.8), tensor(0.6, 0.4), tensor(0.1, -0.1), 1.0),
}
every = pytest.mark.parametrize("name", EDGES)


def derivatives(function, *arguments: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.clone().requires_grad_() for each in arguments]
    value = function(*leaves)
    return (value.detach(), *torch.autograd.grad(value.sum(), leaves))


@every
def test_what_is_absent_on_both_sides_changes_nothing(name):
    manifold, point, other, tangent, edge = EDGES[name]
    longer = [torch.cat([each, tensor(edge)]) for each in (point, other)]
    still = torch.cat([tangent, tensor(0.0)])
    calls = {
        "distance": ((point, other), longer),
        "log": ((point, other), longer),
        "exp": ((point, tangent), [longer[0], still]),
        "transport": ((point, other, tangent), [*longer, still]),
        "inner": ((point, tangent, tangent), [longer[0], still, still]),
        "natural": ((point, tangent), [longer[0], still]),
    }
    for method, (inside, on_edge) in calls.items():
        value, *slopes = derivatives(getattr(manifold, method), *inside)
        found, *more = derivatives(getattr(manifold, method), *on_edge)
        last = {"exp": edge}.get(method, 0.0)
        assert_close(found, value if value.dim() == 0 else torch.cat([value, tensor(last)]), msg=f"{name}, {method}")
        for slope, longer_slope in zip(slopes, more, strict=True):
            assert_close(longer_slope[:-1], slope, msg=f"{name}, {method}")
            assert torch.isfinite(longer_slope).all(), f"{name}, {method}"


@every
def test_the_derivative_on_the_edge_is_the_limit_from_inside(name):
    """d distance / dx_i at x_i on the edge, where the other point is there: by differences to one side."""
    manifold, point, other, _, edge = EDGES[name]
    p, q = (torch.cat([each, tensor(edge)]) for each in (point, other))
    inwards = tensor(0.0, 0.0, 1.0 - 2 * edge)
    _, slope, other_slope = derivatives(manifold.distance, p, q)
    h = 1e-7
    for found, moved in (
        (slope, manifold.distance(p + h * inwards, q)),
        (other_slope, manifold.distance(p, q + h * inwards)),
    ):
        assert_close((moved - manifold.distance(p, q)) / h, found @ inwards, rtol=1e-4, atol=0)


def test_bits_are_classes_of_two():
    """Near, far and opposite ones: the distance of (p, 1 - p) on the simplex."""
    a, b = tensor(0.2, 0.2, 0.0, 1.0, 0.0), tensor(0.2 + 1e-9, 0.9, 1.0, 0.5, 0.0)
    classes = Simplex().distance(torch.stack([a, 1 - a], -1), torch.stack([b, 1 - b], -1))
    assert_close(torch.stack([Bits().distance(x, y) for x, y in zip(a[:, None], b[:, None], strict=True)]), classes)


@pytest.mark.parametrize("family", [Categorical(3), Multinomial(4, 3)], ids=repr)
@pytest.mark.parametrize("logits", [(0.3, -0.2, -torch.inf), (0.3, -torch.inf, -torch.inf)])
def test_families_of_classes_that_cannot_come(family, logits):
    theta, other = tensor(*logits), tensor(*logits) + tensor(0.4, 0.0, 0.0)
    value, slope = derivatives(family.entropy, theta)
    assert torch.isfinite(value)
    assert torch.isfinite(slope).all()
    value, *slopes = derivatives(family.kl, theta, other)
    assert torch.isfinite(value)
    assert all(torch.isfinite(each).all() for each in slopes)


def test_singular_covariances_are_refused_on_both_sides():
    manifold = Wasserstein(2)
    round_one = manifold.join(torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64))
    flat = manifold.join(torch.zeros(2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64))
    for pair in ((round_one, flat), (flat, round_one)):
        for call in (manifold.distance, manifold.log):
            with pytest.raises(ValueError, match="positive definite"):
                call(*pair)


@pytest.mark.parametrize(
    ("family", "outside"), [(Normal(), (0.0, 1.0)), (Exponential(), (1.0,))], ids=["normal", "rate"]
)
def test_a_distance_to_no_distribution_is_refused(family, outside):
    inside = torch.full((family.size,), -1.0, dtype=torch.float64)
    with pytest.raises(ValueError, match="outside the natural parameters"):
        fisher_rao(family).distance(inside, tensor(*outside))
