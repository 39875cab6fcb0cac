"""The root of the metric of the smallest layers, and where examples cannot be told apart or lie side by side."""

from __future__ import annotations

import warnings

import pytest
import torch
from models import F64, Assembled, Case, assert_close, build_seeded, draw, reference_jacobian, reference_metric
from torch import Tensor, nn

from natgrad.families import Categorical, Gaussian, Likelihood
from natgrad.ground.spaces import trainable
from natgrad.metrics import fisher
from natgrad.operators import linearization
from natgrad.operators.rows import Rows
from natgrad.solvers import CG, Auto, SampleSpace


def build_gain() -> nn.Module:
    """One number as a parameter."""
    return Assembled(lambda m, x: x * m.gain.exp(), gain=nn.Parameter(torch.tensor(0.7)))


class Squeezed(nn.Module):
    """A layer on one number per position, (b, 4) -> (b, 4)."""

    def __init__(self, layer: nn.Module, channels: bool = False) -> None:
        super().__init__()
        self.layer, self.channels = layer, channels

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.unsqueeze(1)).flatten(1) if self.channels else self.layer(x.unsqueeze(2)).flatten(1)


ONES = {
    "PReLU": nn.PReLU,
    "PReLU per channel": lambda: nn.PReLU(4),
    "one number": build_gain,
    "linear, one in and out": lambda: Squeezed(nn.Linear(1, 1)),
    "linear without bias": lambda: Squeezed(nn.Linear(1, 1, bias=False)),
    "convolution by one": lambda: Squeezed(nn.Conv1d(1, 1, 1), True),
    "transposed by one": lambda: Squeezed(nn.ConvTranspose1d(1, 1, 1), True),
    "group norm": lambda: Squeezed(nn.GroupNorm(1, 1), True),
    "layer norm without shift": lambda: nn.LayerNorm(4, bias=False),
    "bilinear": lambda: Squeezed(nn.Sequential(nn.Linear(1, 1, bias=False), nn.PReLU())),
}


@pytest.mark.parametrize("name", ONES)
def test_a_layer_of_one_number_has_every_form_of_the_metric(name):
    model = build_seeded(lambda: nn.Sequential(nn.Linear(3, 4), ONES[name](), nn.Linear(4, 2)))
    params = dict(trainable(model))
    for b in (1, 5):
        x = draw(b, 3, seed=b)
        expected = reference_metric(Case(lambda: model, x, Gaussian()), model, params)
        operator = fisher(model, Gaussian()).at(params, x)
        root, vector = operator.root(), draw(len(expected), seed=9)
        assert root is not None
        assert_close(root @ root.mT, expected, 1e-11)
        assert_close(operator.dense(), expected, 1e-11)
        assert_close(operator.diagonal(), expected.diagonal(), 1e-11)
        assert_close(operator.trace(), expected.trace(), 1e-11)
        value = torch.linalg.solve(expected + 0.1 * torch.eye(len(expected), dtype=F64), vector)
        for solver in (Auto(), SampleSpace(), CG(rtol=1e-12, max_steps=300)):
            assert_close(solver.solve(operator, vector, damping=0.1).value, value, 1e-8)


def build_recurrent() -> nn.Module:
    """(t, b, 3) -> (t, b, 2), mixing along the first dimension."""
    return Assembled(lambda m, x: m.out(torch.tanh(m.inner(x).cumsum(0))), inner=nn.Linear(3, 4), out=nn.Linear(4, 2))


@pytest.mark.parametrize("family", [Categorical(), Gaussian()])
def test_examples_along_the_second_dimension_are_told_apart(family: Likelihood):
    model, x = build_seeded(build_recurrent), draw(4, 3, 3)
    rows = fisher(model, family).at(trainable(model), x).rows
    assert rows is not None
    jacobian = reference_jacobian(model, {}, x, family.rows).flatten(0, 1)
    root = family.root(family.rows(model(x).detach()))
    expected = torch.einsum("ima,imq->aiq", jacobian.view(*root.shape[:2], -1), root).flatten(1) / len(root) ** 0.5
    assert_close(rows.dense(), expected, 1e-11)
    assert rows.separable == isinstance(family, Categorical)  # for the other a row holds all examples of a time


def residuals(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Two sets of points in one function: which row is of which kind depends on its place."""
    u = torch.tanh(x @ params["w"]) @ params["v"]
    half = len(x) // 2
    return torch.cat([u[:half].square(), u[half:] - 1])


@pytest.fixture
def unsaid():
    linearization.say_once.cache_clear()


@pytest.mark.usefixtures("unsaid")
def test_residuals_that_mix_their_points_are_named_once_with_what_to_do():
    params = {"w": draw(2, 3).requires_grad_(), "v": draw(3, 1, seed=1).requires_grad_()}
    metric = fisher(residuals, Gaussian())
    with pytest.warns(UserWarning, match=r"one backward pass per output.* metric of its own"):
        root = metric.at(params, draw(Rows.MANY + 2, 2)).root()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = metric.at(params, draw(Rows.MANY + 2, 2)).root()
        few = metric.at(params, draw(4, 2)).rows
    assert torch.equal(root, again)
    assert few is not None
    assert not few.separable


@pytest.mark.usefixtures("unsaid")
def test_the_same_residuals_as_a_sum_of_metrics_are_told_apart():
    params = {"w": draw(2, 3).requires_grad_(), "v": draw(3, 1, seed=1).requires_grad_()}
    x, half = draw(70, 2), 35

    def inside(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["w"]) @ p["v"]).square()

    def edge(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.tanh(x @ p["w"]) @ p["v"] - 1

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        terms = [fisher(f, Gaussian()).at(params, part) for f, part in ((inside, x[:half]), (edge, x[half:]))]
        together = 0.5 * (terms[0] + terms[1])
        assert all(term.rows.separable for term in terms)
    with pytest.warns(UserWarning, match="one backward pass per output"):
        expected = fisher(residuals, Gaussian()).at(params, x).root()
    assert_close(together.dense(), expected @ expected.mT, 1e-11)


class Asking(torch.autograd.Function):
    """The sine, whose backward pass looks at a number, which batched transforms refuse."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, slope: Tensor) -> Tensor:
        return slope * ctx.saved_tensors[0].cos() * (1.0 if float(slope.sum()) < torch.inf else 0.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sine", ["torch's", "refused in batches", "wrong in batches"])
def test_rows_that_cannot_be_told_apart_are_right_whatever_batches_of_them_give(sine, monkeypatch):
    params = {"w": draw(2, 3).requires_grad_(), "v": draw(3, 1, seed=1).requires_grad_(), "unused": draw(2)}
    params["unused"].requires_grad_()
    x = draw(Rows.AT_ONCE + 9, 2)
    sin, batch = Asking.apply if sine == "refused in batches" else torch.sin, linearization.Linearization.vjp_batch

    def mix_rows(p: dict[str, Tensor], x: Tensor) -> Tensor:
        u = sin(x @ p["w"]) @ p["v"]
        return u + u.mean() * torch.arange(len(u), dtype=F64).unsqueeze(1)

    def double_batch(self, cotangents: Tensor) -> Tensor:
        rows = batch(self, cotangents)
        assert rows is not None
        return 2 * rows

    rows = fisher(mix_rows, Gaussian()).at(params, x).rows
    assert rows is not None
    assert not rows.separable
    if sine == "wrong in batches":
        monkeypatch.setattr(linearization.Linearization, "vjp_batch", double_batch)
    assert_close(
        rows.dense(), torch.stack([rows.backward(unit) for unit in torch.eye(len(x), dtype=F64)], dim=1), 1e-11
    )
