"""Each path that meets a singular or overflowing matrix ends in the same way, whatever the processor makes of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import F64, draw
from processors import KINDS, pretend
from torch import Tensor

import natgrad as ng
from natgrad import flows
from natgrad.families import Expectation, FixedCovarianceNormal, FixedMeanNormal, MeanCovariance, Natural
from natgrad.families.mean_gradient import solve_least_norm
from natgrad.geometry import (
    Location,
    NaturalParameters,
    Normals,
    PositiveDefinite,
    Wasserstein,
    e_projection,
    fisher_rao,
    tilt,
)
from natgrad.ground.linalg import (
    cholesky,
    inverse_psd,
    psd_root,
    pseudo_inverse,
    pseudo_solve,
    solve_psd,
    take_absolute,
    woodbury_solve,
)
from natgrad.operators import DenseOperator, KroneckerOperator, LowRankOperator
from natgrad.search.cma import Full
from natgrad.search.sparse import regress_blocks
from natgrad.search.xnes import XNES
from natgrad.structures.adaptive_inverse import stays_positive, woodbury_inverse
from natgrad.variational import inducing

MATRICES = {
    "singular": torch.ones(2, 2, dtype=F64),
    "singular by round-off": torch.outer(v := torch.tensor([0.1, 0.7], dtype=F64), v),
    "zero": torch.zeros(2, 2, dtype=F64),
    "overflowing": torch.tensor([[torch.inf, 1.0], [1.0, 1.0]], dtype=F64),
    "underflowing": 1e-310 * torch.eye(2, dtype=F64),
    "not a number": torch.full((2, 2), torch.nan, dtype=F64),
    "indefinite": torch.tensor([[1.0, 2.0], [2.0, 1.0]], dtype=F64),
}
SOUND = torch.tensor([[2.0, 0.3], [0.3, 1.0]], dtype=F64)
U = torch.tensor([[0.3, -0.2], [-0.2, 0.5]], dtype=F64)
MEAN = torch.tensor([1.0, -2.0], dtype=F64)
CONE, NORMALS, BURES, PLANE = PositiveDefinite(), Normals(2), Wasserstein(2), ng.MultivariateNormal(2)
THETA = fisher_rao(PLANE)
BITS = ng.Ising(3)
WHOLE = torch.tensor([0.2, -0.1, 0.3, 0.5, -0.4, 0.1], dtype=F64)
CLASSES = ng.Categorical(3)  # three logits for two degrees of freedom: the Fisher matrix is singular everywhere
LOGITS = torch.tensor([0.1, 0.5, -0.2], dtype=F64)


def normal(covariance: Tensor) -> Tensor:
    return NORMALS.join(MEAN, covariance)


def theta_of(precision: Tensor) -> Tensor:
    return torch.cat([MEAN, PLANE.pack(-precision / 2)])


def moments_of(covariance: Tensor) -> Tensor:
    return torch.cat([MEAN, PLANE.pack(covariance + torch.outer(MEAN, MEAN), 2.0)])


TANGENT = NORMALS.join(torch.tensor([0.2, 0.1], dtype=F64), U)

GEOMETRY: dict[str, Callable[[Tensor], Any]] = {
    "cone: product": lambda a: CONE.inner(a, U, U),
    "cone: exp": lambda a: CONE.exp(a, U),
    "cone: log": lambda a: CONE.log(a, SOUND),
    "cone: log to": lambda a: CONE.log(SOUND, a),
    "cone: distance": lambda a: CONE.distance(a, SOUND),
    "cone: distance to": lambda a: CONE.distance(SOUND, a),
    "cone: transport": lambda a: CONE.transport(a, SOUND, U),
    "cone: retract": lambda a: CONE.retract(a, U),
    "cone: retract along": lambda a: CONE.retract(SOUND, a),
    "normals: product": lambda a: NORMALS.inner(normal(a), TANGENT, TANGENT),
    "normals: exp": lambda a: NORMALS.exp(normal(a), TANGENT),
    "normals: exp along": lambda a: NORMALS.exp(normal(SOUND), 300 * normal(a)),
    "normals: log": lambda a: NORMALS.log(normal(a), normal(SOUND)),
    "normals: retract": lambda a: NORMALS.retract(normal(a), TANGENT),
    "normals: retract along": lambda a: NORMALS.retract(normal(SOUND), 1e200 * normal(a).clamp(max=1e90)),
    "normals: carry": lambda a: NORMALS.carry(normal(a), TANGENT, TANGENT),
    "bures: product": lambda a: BURES.inner(normal(a), TANGENT, TANGENT),
    "bures: log": lambda a: BURES.log(normal(a), normal(SOUND)),
    "bures: distance": lambda a: BURES.distance(normal(a), normal(SOUND)),
    "bures: transport": lambda a: BURES.transport(normal(a), normal(SOUND), TANGENT),
    "bures: transport to": lambda a: BURES.transport(normal(SOUND), normal(a), TANGENT),
    "natural parameters of normals: exp": lambda a: THETA.exp(theta_of(a), 0.1 * theta_of(U)),
    "natural parameters of normals: distance": lambda a: THETA.distance(theta_of(SOUND), theta_of(a)),
    "natural parameters of normals: retract along": lambda a: THETA.retract(theta_of(SOUND), 1e60 * theta_of(a)),
    "location": lambda a: Location(a).distance(MEAN, 2 * MEAN),
}
FAMILIES: dict[str, Callable[[Tensor], Any]] = {
    "normal of moments": lambda a: PLANE.from_mean_covariance(MEAN, a),
    "normal's expectation": lambda a: PLANE.expectation(theta_of(a)),
    "normal's log partition": lambda a: PLANE.log_partition(theta_of(a)),
    "normal's Fisher matrix": lambda a: PLANE.fisher(theta_of(a)).dense(),
    "normal, inside": lambda a: PLANE.inside(theta_of(a)),
    "normal, draws": lambda a: PLANE.sample(theta_of(a), 3, generator=torch.Generator().manual_seed(0)),
    "coordinates of normals": lambda a: MeanCovariance(PLANE).natural(torch.cat([MEAN, PLANE.pack(a)])),
    "known covariance": lambda a: FixedCovarianceNormal(a).natural(MEAN),
    "known mean": lambda a: FixedMeanNormal(MEAN).natural(FixedMeanNormal(MEAN).pairs.pack(a, 2.0)),
    "quadrature": lambda a: flows.expected(PLANE, lambda x: x.square().sum(1))(theta_of(a)),
    "flow": lambda a: flows.flow_field(flows.expected(PLANE, lambda x: x.square().sum(1)), PLANE)(theta_of(a)),
    "slopes of coordinates": lambda a: flows.expectation_coordinates(PLANE).slope(moments_of(a)),
}
RUNS: dict[str, Callable[[Tensor], Any]] = {
    "sparse search": lambda a: list(regress_blocks([border_block(a)]).values()),
    "full search": lambda a: Full().whiten({"root": a}, U),
    "xnes": lambda a: XNES().whiten({"shape": a}, U),
    "variational": lambda a: ng.variational(lambda z: -z.square().sum(-1) / 2, 2, covariance=a).step(),
    "variational, on its way": lambda a: astray(a).step(),
    "inducing points": lambda a: inducing(a, U, torch.ones(2, dtype=F64)),
    "ladder": lambda a: (cholesky(a).lower, cholesky(a).failed),
    "solve_psd": lambda a: solve_psd(a, MEAN),
    "inverse_psd": lambda a: inverse_psd(torch.stack([SOUND, a])),
    "pseudo_solve": lambda a: pseudo_solve(a, MEAN),
    "pseudo_inverse": lambda a: pseudo_inverse(torch.stack([SOUND, a])),
    "woodbury_solve": lambda a: woodbury_solve(a, MEAN, 1e-3),
    "adaptive inverse": lambda a: (stays_positive(a, U, 0.1), woodbury_inverse(a, U, 0.1)),
    "direct": lambda a: ng.Direct().solve(DenseOperator(a), MEAN).value,
    "natural gradient": lambda a: ng.natural_gradient(DenseOperator(a), MEAN).value,
    "symmetric root and absolute value": lambda a: (psd_root(a), take_absolute(a)),
    "Kronecker factors": lambda a: KroneckerOperator(a, SOUND).inverse(1e-3),
    "low rank": lambda a: LowRankOperator(a).inverse(1e-3),
    "slopes of least norm": lambda a: solve_least_norm(a, U),
    "preconditioned by its inverse": lambda a: DenseOperator(a).inverse(0.0),
}
FIXED: dict[str, Callable[[], Any]] = {
    "e-projection from the edge": lambda: e_projection(
        ng.SubModel(BITS, [0, 1, 3]), WHOLE, torch.tensor([400.0, 400.0, 400.0], dtype=F64)
    ),
    "tilt to the edge": lambda: tilt(BITS, WHOLE, [0, 1], torch.tensor([1.0, 1.0], dtype=F64)),
    "natural gradient of too many logits": lambda: NaturalParameters(CLASSES).natural(LOGITS, LOGITS),
    "natural gradient in coordinates": lambda: Natural(CLASSES).natural_gradient(LOGITS, LOGITS),
    "natural gradient of a mean": lambda: ng.natural_gradient_of_mean(
        CLASSES, LOGITS, draw(6), torch.tensor([0, 1, 2, 0, 1, 2]), method="fisher"
    ),
    "Fisher matrix in expectations": lambda: Expectation(BITS).fisher(torch.full((6,), 1.0, dtype=F64)).dense(),
    "expectations at the edge": lambda: ng.Gamma().natural(torch.tensor([0.0, 1.0], dtype=F64)),
    "edge of bits": lambda: BITS.natural(torch.tensor([1.0, 0.5, 0.5, 0.5, 0.5, 0.25], dtype=F64)),
}


def border_block(block: Tensor) -> Tensor:
    """One variable with two neighbours, whose moments are the block."""
    whole = torch.eye(3, dtype=F64)
    whole[1:, 1:], whole[0, 1:], whole[1:, 0] = block, 0.3, 0.3
    return whole.unsqueeze(0)


def astray(precision: Tensor) -> Any:
    found = ng.variational(lambda z: -z.square().sum(-1) / 2, 2)
    found.precision = precision
    return found


def flat(found: Any) -> Iterator[Tensor]:
    if isinstance(found, (list, tuple)):
        for part in found:
            yield from flat(part)
    elif hasattr(found, "dense"):
        yield found.dense()
    elif found is not None:
        yield torch.as_tensor(found, dtype=F64)


def outcome(call: Callable[[], Any]) -> list[Tensor] | str:
    """What the call gives, or the sentence of its ValueError; anything else that it raises is a failure."""
    try:
        return [part.detach() for part in flat(call())]
    except ValueError as error:
        return str(error)


def compare(call: Callable[[], Any]) -> None:
    found = []
    for kind in KINDS:
        with pytest.MonkeyPatch.context() as patch:
            pretend(kind, patch)
            found.append(outcome(call))
    first, second = found
    outcome(call)  # on this processor, which may be of a third kind
    if isinstance(first, str) or isinstance(second, str):
        assert first == second
        return
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.isfinite(), other.isfinite())
        torch.testing.assert_close(one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0), rtol=1e-9, atol=1e-300)


@pytest.mark.parametrize("name", [*GEOMETRY, *FAMILIES, *RUNS])
def test_a_bad_matrix_has_one_outcome(name: str):
    for matrix in MATRICES.values():
        compare(lambda: (GEOMETRY | FAMILIES | RUNS)[name](matrix.clone()))  # noqa: B023


@pytest.mark.parametrize("name", FIXED)
def test_a_singular_metric_has_one_outcome(name: str):
    compare(FIXED[name])
