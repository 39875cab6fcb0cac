"""The columns of U in G = U U^T: the three ways to them agree with plain backward passes, for every kind of layer."""

from __future__ import annotations

import pytest
import torch
from models import CASES, F64, X3, Assembled, Case, assert_close, draw, reference_jacobian, reference_outputs
from torch import Tensor, nn

from natgrad.families import Categorical, Gaussian
from natgrad.ground.pure import Call, PureModel
from natgrad.ground.spaces import trainable
from natgrad.metrics import empirical_fisher, fisher
from natgrad.operators import Linearization, OutputMap, Rows


def reference_rows(case: Case, model, params) -> Tensor:
    """U (n, r) by one plain backward pass per output, columns ordered by row, then by column of the form's root."""
    jacobian = reference_jacobian(model, params, case.inputs, case.family.rows)
    root = case.family.root(case.family.rows(reference_outputs(model, params, case.inputs)))
    return torch.einsum("ima,imq->aiq", jacobian, root).flatten(1) / len(jacobian) ** 0.5


def rows_of(case: Case) -> tuple[Rows, Tensor]:
    model, params = case.make()
    rows = fisher(model, case.family).at(params, case.inputs).rows
    assert rows is not None
    return rows, reference_rows(case, model, params)


CONVOLUTIONS = {
    "stride": nn.Conv2d(2, 3, 3, stride=2),
    "padding": nn.Conv2d(2, 3, 3, padding=2),
    "dilation": nn.Conv2d(2, 3, 2, dilation=2),
    "all, unequal": nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 3)),
    "convolution without bias": nn.Conv2d(2, 3, 3, bias=False),
    "groups": nn.Conv2d(2, 4, 3, groups=2),
    "same": nn.Conv2d(2, 3, 3, padding="same"),
    "valid": nn.Conv2d(2, 3, 3, padding="valid"),
    "circular": nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"),
    "reflect": nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"),
    "1 by 1": nn.Conv2d(2, 3, 1),
    "transposed": nn.ConvTranspose2d(2, 3, 2, stride=2),
}


def behind(convolution: nn.Module) -> Case:
    """A small network on images."""

    def build() -> nn.Module:
        size = convolution.double()(torch.zeros(1, 2, 6, 5, dtype=F64)).numel()
        return nn.Sequential(convolution, nn.Tanh(), nn.Flatten(), nn.Linear(size, 2))

    return Case(build, draw(3, 2, 6, 5, seed=1), Gaussian())


class AcrossExamples(nn.Module):
    """Every example's output depends on all examples, behind an ordinary layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3) -> (b, 2)."""
        y = torch.tanh(self.layer(x))
        return y - y.mean(0)


def build_time_first() -> nn.Module:
    """Inputs (b, t, 3) worked on as (t, b, 3), with t = b: no shape betrays it."""
    return Assembled(
        lambda m, x: m.out(torch.tanh(m.layer(x.transpose(0, 1)))).sum(0), layer=nn.Linear(3, 4), out=nn.Linear(4, 2)
    )


def build_reordered() -> nn.Module:
    """A layer that sees the examples in reverse order."""
    return Assembled(
        lambda m, x: m.out(torch.tanh(m.layer(x.flip(0))).flip(0)), layer=nn.Linear(3, 4), out=nn.Linear(4, 2)
    )


def build_unbatched() -> nn.Module:
    """A layer applied to a parameter, as many outputs as there are examples."""
    return Assembled(
        lambda m, x: m.out(x) * torch.tanh(m.layer(m.code)),
        code=nn.Parameter(torch.linspace(-1, 1, 3)),
        layer=nn.Linear(3, 4),
        out=nn.Linear(3, 4),
    )


class Subclassed(nn.Linear):
    """A linear layer by name, which computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3) -> (b, 2)."""
        return super().forward(x).square()


class Hooked(nn.Module):
    """A forward hook of the user's changes what the layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.layer.register_forward_hook(lambda module, args, output: output * module.weight.sum())

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3) -> (b, 2)."""
        return self.layer(x)


TRAPS = {
    "across examples": (AcrossExamples, X3),
    "time first": (build_time_first, draw(3, 3, 3)),
    "examples reordered": (build_reordered, X3),
    "layer on a parameter": (build_unbatched, X3),
    "subclass": (lambda: Subclassed(3, 2), X3),
    "hooked": (Hooked, X3),
    "inner dropout": (lambda: nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 2)), X3),
    "in-place after a layer": (lambda: nn.Sequential(nn.Linear(3, 6), nn.ReLU(inplace=True), nn.Linear(6, 2)), X3),
    "weight norm": (lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Linear(4, 2)), X3),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)), nn.Linear(4, 2)),
        X3,
    ),
    "own rectifier": (lambda: nn.Sequential(nn.Linear(3, 4), nn.PReLU(4), nn.LayerNorm(4), nn.Linear(4, 2)), X3),
}


def frozen_weight(layer: nn.Linear) -> nn.Linear:
    layer.weight.requires_grad_(False)
    return layer


KNOWN = {
    "layer norm": ((5, 3), lambda: (nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))),
    "group norm of one dimension": (
        (5, 2, 3),
        lambda: (nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(8, 2)),
    ),
    "groups of one dimension": ((5, 4, 3), lambda: (nn.Conv1d(4, 4, 2, groups=2), nn.Flatten(), nn.Linear(8, 2))),
    "same, small": ((5, 1, 3, 3), lambda: (nn.Conv2d(1, 2, 3, padding="same"), nn.Flatten(), nn.Linear(18, 2))),
    "transposed of one dimension": ((5, 2, 3), lambda: (nn.ConvTranspose1d(2, 2, 2), nn.Flatten(), nn.Linear(8, 2))),
    "a bias alone": ((5, 3), lambda: (frozen_weight(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2))),
}
ALL = {
    **CASES,
    **{name: behind(convolution) for name, convolution in CONVOLUTIONS.items()},
    **{name: Case(build, inputs, Gaussian()) for name, (build, inputs) in TRAPS.items()},
    **{
        name: Case(lambda build=build: nn.Sequential(*build()), draw(*shape), Gaussian())
        for name, (shape, build) in KNOWN.items()
    },
}


@pytest.mark.parametrize("name", ALL)
def test_rows_and_their_products_are_those_of_plain_backward_passes(name):
    """Rows of layers are compared with a backward pass, and given up where a parameter is used otherwise."""
    rows, expected = rows_of(ALL[name])
    weights, vector = draw(rows.rank, seed=1), draw(rows.space.size, seed=2)
    assert_close(rows.dense(), expected, 1e-12)
    assert_close(rows.gram(), expected.mT @ expected, 1e-12)
    assert_close(rows.squares(), expected.square().sum(1), 1e-12)
    assert_close(rows.mv(weights), expected @ weights, 1e-12)
    assert_close(rows.rmv(vector), expected.mT @ vector, 1e-12)


@pytest.mark.parametrize("name", ["mlp", "conv2d", "sequence, tied", "plain function", "batch norm, training"])
def test_the_gram_matrix_of_the_empirical_fisher_is_that_of_example_gradients(name):
    case = CASES[name]
    model, params = case.make()
    outputs = case.family.rows(reference_outputs(model, params, case.inputs))
    targets = torch.arange(len(outputs)) % outputs.shape[1]
    shape = reference_outputs(model, params, case.inputs).shape[:-1]
    operator = empirical_fisher(model, Categorical()).at(params, (case.inputs, targets.view(shape)))
    rows = operator.rows
    jacobian = reference_jacobian(model, params, case.inputs, case.family.rows)
    residual = nn.functional.one_hot(targets, outputs.shape[1]) - outputs.softmax(1)
    gradients = torch.einsum("ima,im->ia", jacobian, residual)
    assert_close(rows.gram(), gradients @ gradients.mT / len(gradients), 1e-12)
    both = (fisher(model, Categorical()).at(params, case.inputs) + operator).sample_rows  # of more rows per example
    assert_close(both.gram(), both.dense().mT @ both.dense(), 1e-12)


# rows from the pass that the linearisation has recorded


def build_tied() -> nn.Module:
    """A weight is used outside of its layer too, which taps do not tell."""
    return Assembled(
        lambda m, x: m.outer((m.inner(x).tanh() @ m.inner.weight).tanh()),
        inner=nn.Linear(3, 3, dtype=F64),
        outer=nn.Linear(3, 1, dtype=F64),
    )


RECORDED = {
    "layers": lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double(),
    "in place": lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 1)).double(),
    "a weight used outside of its layer": build_tied,
    "dropout": lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double(),
    "mixed examples": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double(),
}


@pytest.mark.parametrize("name", RECORDED)
def test_they_are_the_derivatives_of_the_recorded_outputs(name: str) -> None:
    torch.manual_seed(0)
    model, x = RECORDED[name](), torch.randn(6, 3, dtype=F64)
    function = OutputMap(PureModel(model, Call((x,))), lambda outputs: outputs)
    linearization = Linearization(function, trainable(model), recorded=True)
    factor = torch.rand(6, 1, 1, dtype=F64) + 0.5
    expected = [
        linearization.vjp(factor[i, 0, 0] * unit.unsqueeze(1)) for i, unit in enumerate(torch.eye(6, dtype=F64))
    ]
    rows = Rows(linearization, factor)
    assert_close(rows.dense(), torch.stack(expected, dim=1), rtol=1e-9)
    probe = torch.randn(linearization.space.size, dtype=F64)
    assert_close(rows.rmv(probe), factor.view(-1) * linearization.jvp(probe).view(-1), rtol=1e-9)
