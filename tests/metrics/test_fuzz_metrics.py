"""Random networks, likelihoods, metrics, structures and solvers against their definitions, written out in float64.

The suite draws the same few on every run; `--hypothesis-profile=long` draws fresh ones, and more.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from engine_state import blocks_of, metric_of
from fuzz_nets import Net, nets
from hypothesis import given
from hypothesis import strategies as st
from models import F64, draw
from torch import Tensor, nn
from torch.distributions import Poisson
from torch.nn import functional

import natgrad as ng
from natgrad.families import as_criterion
from natgrad.optim import StructuredNaturalGradient
from natgrad.structures import ExactLabels

pytestmark = pytest.mark.filterwarnings("ignore:natgrad:UserWarning")  # of slow ways, which are right ones

SOLVERS = (ng.Auto(), ng.Direct(), ng.SampleSpace(), ng.CG(rtol=1e-11, max_steps=2000), ng.MinresQLP(rtol=1e-11))


def call(net: Net, params: dict[str, Tensor] | None = None) -> Tensor:
    """The outputs, with no trace left in the model."""
    model = copy.deepcopy(net.model)
    args = net.inputs if isinstance(net.inputs, tuple) else (net.inputs,)
    return model(*args) if params is None else torch.func.functional_call(model, params, args)


def flat_params(model: nn.Module) -> tuple[Tensor, dict[str, torch.Size]]:
    params = dict(ng.trainable(model))
    return torch.cat([p.detach().reshape(-1) for p in params.values()]), {n: p.shape for n, p in params.items()}


def unflatten(vector: Tensor, shapes: dict[str, torch.Size]) -> dict[str, Tensor]:
    parts = vector.split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def jacobian_of(net: Net) -> tuple[Tensor, Tensor]:
    """d outputs / d params (outputs, n), a plain backward pass each, and the outputs flat."""
    vector, shapes = flat_params(net.model)
    vector.requires_grad_()
    outputs = call(net, unflatten(vector, shapes)).reshape(-1)
    rows = [torch.autograd.grad(o, vector, retain_graph=True)[0] for o in outputs]
    return torch.stack(rows), outputs.detach()


def expected_outer(log_p: Any, probabilities: Tensor, point: Tensor) -> Tensor:
    """sum_y p(y) s_y s_y^T per row of the point (R, m), log_p: (values, y) -> (R,)."""
    found = torch.zeros(*point.shape, point.shape[1], dtype=F64)
    for y, p in enumerate(probabilities.unbind(-1)):
        z = point.clone().requires_grad_()
        (score,) = torch.autograd.grad(log_p(z, y).sum(), z)
        found += p.view(-1, 1, 1) * score.unsqueeze(2) * score.unsqueeze(1)
    return found


def form_of(name: str, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """M (R, m, m) by summing over labels, and the places (R, m) of a row's entries among the flat outputs."""
    places = torch.arange(outputs.numel()).view(outputs.shape)
    if name in ("Categorical", "CrossEntropyLoss"):
        axis = -1 if name == "Categorical" else 1
        places = places.movedim(axis, -1).flatten(0, -2)
        rows = outputs.reshape(-1)[places]
        return expected_outer(lambda z, y: z.log_softmax(1)[:, y], rows.softmax(1), rows), places
    entry = outputs.reshape(-1, 1)
    if name in ("Bernoulli", "BCEWithLogitsLoss"):
        one = entry.sigmoid()
        forms = expected_outer(lambda z, y: functional.logsigmoid(z if y else -z), torch.cat([1 - one, one], 1), entry)
    elif name in ("Poisson", "PoissonNLLLoss"):
        family = Poisson(entry.exp())
        likely = torch.cat([family.log_prob(torch.full_like(entry, y)).exp() for y in range(120)], 1)
        forms = expected_outer(lambda z, y: y * z - z.exp(), likely, entry)
    else:
        information = {"MSELoss": 2.0, "L1Loss": 1.0, "Gaussian": 1 / 0.7**2}[name]
        forms = torch.ones_like(entry).unsqueeze(2) * information
    if name.endswith("Loss"):  # a mean over entries
        return forms, places.reshape(-1, 1)
    return torch.stack([part.reshape(-1).diag() for part in forms.split(outputs[0].numel())]), places.flatten(1)


LIKELIHOODS: dict[str, Any] = {
    "Categorical": ng.Categorical(),
    "Bernoulli": ng.Bernoulli(),
    "Poisson": ng.Poisson(),
    "Gaussian": ng.Gaussian(0.7),
    "CrossEntropyLoss": nn.CrossEntropyLoss(),
    "BCEWithLogitsLoss": nn.BCEWithLogitsLoss(),
    "MSELoss": nn.MSELoss(),
    "PoissonNLLLoss": nn.PoissonNLLLoss(),
    "L1Loss": nn.L1Loss(),
}


def fisher_by_definition(net: Net, name: str) -> tuple[Tensor, Tensor]:
    """E_x E_y [g g^T], over rows of outputs, and the largest square of a derivative."""
    jacobian, outputs = jacobian_of(net)
    forms, places = form_of(name, outputs.view(call(net).shape))
    parts = jacobian[places]  # (R, m, n)
    return torch.einsum("rmi,rmk,rkj->ij", parts, forms, parts) / len(parts), jacobian.square().max()


def require(found: Tensor, expected: Tensor, what: str, rtol: float = 1e-8, size: Tensor | None = None) -> None:
    """size: the largest entry that a row's term may have: what cancels to zero leaves its round-off."""
    scale = max(float(expected.abs().max()), 0.0 if size is None else 1e-6 * float(size)) or 1.0
    error = float((found - expected).abs().max()) / scale
    assert error <= rtol, f"{what} is off by {error:.2g}"


def small(net: Net) -> bool:
    return sum(p.numel() for p in net.model.parameters()) <= 120


@given(net=nets().filter(small), name=st.sampled_from(list(LIKELIHOODS)), chunk=st.sampled_from([None, None, 1, 2]))
def test_fuzz_every_form_of_the_fisher_is_its_definition(net: Net, name: str, chunk: int | None):
    state = copy.deepcopy(net.model.state_dict())
    expected, size = fisher_by_definition(net, name)
    params, unchunked = ng.trainable(net.model), chunk is None or net.mixes or net.inputs.__class__ is tuple
    second = net.kind in ("attention", "encoder", "pooled", "recurrent", "sequence", "graph")  # examples may be second
    chunk = None if unchunked or second else chunk
    operator = ng.fisher(net.model, LIKELIHOODS[name], chunk_size=chunk).at(params, net.inputs)
    block = draw(len(expected), 2, seed=1)
    root = operator.root()
    require(operator.dense(), expected, "dense", size=size)
    require(operator.mv(block[:, 0]), expected @ block[:, 0], "mv", size=size)
    require(operator.mm(block), expected @ block, "mm", size=size)
    require(operator.diagonal(), expected.diagonal(), "diagonal", size=size)
    require(operator.trace(), expected.trace(), "trace", size=size)
    require(root @ root.mT, expected, "root", size=size)
    found, sought = (2 * operator + operator).shift(0.3).mv(block[:, 1]), 3 * expected @ block[:, 1] + 0.3 * block[:, 1]
    require(found, sought, "sum", size=size)
    for key, value in net.model.state_dict().items():
        assert torch.equal(value, state[key]), f"{key} was changed"
    assert all(p.grad is None for p in net.model.parameters())


@given(net=nets().filter(small), name=st.sampled_from(list(LIKELIHOODS)), solver=st.sampled_from(SOLVERS))
def test_fuzz_every_solver_finds_the_damped_step(net: Net, name: str, solver: ng.solvers.Solver):
    expected = fisher_by_definition(net, name)[0]
    n = len(expected)
    operator, gradient = (
        ng.fisher(net.model, LIKELIHOODS[name]).at(ng.trainable(net.model), net.inputs),
        draw(n, seed=2),
    )
    found = ng.natural_gradient(operator, gradient, solver=solver, damping=0.1)
    require(found.value, torch.linalg.solve(expected + 0.1 * torch.eye(n, dtype=F64), gradient), repr(solver), 1e-6)


STRUCTURES = (ng.Diagonal, ng.UnitWise, ng.EigenKronecker)


@given(net=nets().filter(small), name=st.sampled_from(list(LIKELIHOODS)), kind=st.sampled_from(STRUCTURES))
def test_fuzz_structures_hold_blocks_of_the_definition(net: Net, name: str, kind: Any):
    if net.mixes:  # a batch norm's examples meet: blocks take them apart all the same
        return
    expected, size = fisher_by_definition(net, name)
    metric, params = ng.fisher(net.model, LIKELIHOODS[name]), ng.trainable(net.model)
    operator = kind(estimate=ExactLabels()).update(None, metric, params, net.inputs)[0]
    require(operator.trace(), expected.trace(), f"the trace of {kind}", size=size)
    if kind is not ng.EigenKronecker:
        found = operator.dense()
        require(found, torch.where(found != 0, expected, 0), repr(kind), size=size)
        require(found.diagonal(), expected.diagonal(), f"the diagonal of {kind}", size=size)


@st.composite
def losses(draw: st.DrawFn, outputs: Tensor) -> tuple[nn.Module, Tensor]:
    """A criterion with options, and targets for outputs (b, w) or (b, w, ...)."""
    count = outputs.shape[1]
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(["classes", "probabilities", "bits", "squares"] if count > 1 else ["bits", "squares"]))
    reduction = draw(st.sampled_from(["mean", "sum"]))
    if kind == "squares":
        return nn.MSELoss(reduction=reduction), torch.randn(outputs.shape, dtype=F64)
    if kind == "bits":
        weight = torch.rand(outputs.shape[-1], dtype=F64) + 0.1 if draw(st.booleans()) else None
        return nn.BCEWithLogitsLoss(pos_weight=weight, reduction=reduction), torch.rand(
            outputs.shape, dtype=F64
        ).round()
    weight = torch.rand(count, dtype=F64) + 0.2 if draw(st.booleans()) else None
    smoothing = draw(st.sampled_from([0.0, 0.0, 0.3]))
    loss = nn.CrossEntropyLoss(weight, label_smoothing=smoothing, reduction=reduction)
    if kind == "probabilities":
        return loss, torch.rand(outputs.shape, dtype=F64).softmax(1)
    targets = torch.randint(0, count, outputs.movedim(1, -1).shape[:-1])
    if draw(st.booleans()) and targets.numel() > 1:
        targets.view(-1)[0] = loss.ignore_index
    return loss, targets


@given(net=nets().filter(small), data=st.data(), kind=st.sampled_from(["gauss_newton", "hessian"]))
def test_fuzz_curvatures_of_losses_are_second_derivatives(net: Net, data: st.DataObject, kind: str):
    outputs = call(net).detach()
    loss, targets = data.draw(losses(outputs))
    criterion = as_criterion(loss)
    scale = float(criterion.scale(outputs, targets))
    jacobian, flat = jacobian_of(net)

    def value(vector: Tensor) -> Tensor:
        return loss(vector.view(outputs.shape), targets) / scale

    curved = torch.autograd.functional.hessian(value, flat)
    expected, size = jacobian.mT @ curved @ jacobian, jacobian.square().max()
    if kind == "hessian":
        vector, shapes = flat_params(net.model)

        def whole(v: Tensor) -> Tensor:
            with ng.exact_derivatives():
                return value(call(net, unflatten(v, shapes)).reshape(-1))

        expected = torch.autograd.functional.hessian(whole, vector)
    operator = getattr(ng, kind)(net.model, loss).at(ng.trainable(net.model), (net.inputs, targets))
    block = draw(len(expected), 2, seed=3)
    require(operator.mm(block), expected @ block, "mm", 1e-7, size)
    require(operator.diagonal(), expected.diagonal(), "diagonal", 1e-7, size)


@given(net=nets().filter(small), data=st.data(), centred=st.booleans())
def test_fuzz_moments_of_gradients_are_theirs(net: Net, data: st.DataObject, centred: bool):
    """U = E[g g^T] and C = U - gbar gbar^T over rows that count, of classes with weights and ignored targets."""
    outputs = call(net).detach()
    if outputs.shape[1] < 2:
        return
    loss, targets = data.draw(losses(outputs).filter(lambda drawn: isinstance(drawn[0], nn.CrossEntropyLoss)))
    if targets.is_floating_point():
        return
    jacobian, flat = jacobian_of(net)
    counted = targets.reshape(-1) != loss.ignore_index
    weight = torch.ones(outputs.shape[1], dtype=F64) if loss.weight is None else loss.weight
    total = weight[targets.reshape(-1)[counted]].sum()
    each = nn.CrossEntropyLoss(loss.weight, label_smoothing=loss.label_smoothing, reduction="none")
    slopes = torch.autograd.functional.jacobian(lambda v: each(v.view(outputs.shape), targets).reshape(-1), flat)
    share = (1 - loss.label_smoothing) * weight[targets.reshape(-1)[counted]]
    share = (share + loss.label_smoothing * weight.mean()) / total  # what a row's -log p is multiplied by
    rows = (slopes @ jacobian)[counted] / total  # their sum is the gradient of the mean loss
    expected, size = rows.mT @ (rows / share.unsqueeze(1)), jacobian.square().max()
    metric = ng.covariance(net.model, loss, centred=centred)
    if centred:
        expected = expected - torch.outer(rows.sum(0), rows.sum(0)) / share.sum()
    operator = metric.at(ng.trainable(net.model), (net.inputs, targets))
    require(operator.mv(draw(len(expected), seed=4)), expected @ draw(len(expected), seed=4), "mv", 1e-7, size)
    require(operator.dense(), expected, "dense", 1e-7, size)


@given(net=nets().filter(small), name=st.sampled_from([name for name in LIKELIHOODS if name.endswith("Loss")]))
def test_fuzz_an_optimizer_reads_the_diagonal_by_definition(net: Net, name: str):
    if net.kind == "batch norm":
        return
    matrix, size = fisher_by_definition(net, name)
    expected = matrix.diagonal()
    model = net.model.train()
    optimizer = StructuredNaturalGradient(model, LIKELIHOODS[name], ng.Diagonal(estimate=ExactLabels()))
    outputs = model(*(net.inputs if isinstance(net.inputs, tuple) else (net.inputs,)))
    labels = outputs.movedim(1, -1)[..., 0].long() if name == "CrossEntropyLoss" else outputs
    optimizer.loss(outputs, torch.zeros_like(labels.detach())).backward()
    found: dict[str, Tensor] = {}
    for block in blocks_of(optimizer):
        matrix = metric_of(optimizer, block).diagonal().view(block.layout.matrix_shape)
        found |= block.layout.split(matrix)
    optimizer.detach()
    zeros = {key: torch.zeros_like(p) for key, p in model.named_parameters()}  # of what nothing reaches
    diagonal = torch.cat([part.reshape(-1) for part in (zeros | found).values()]).to(F64)
    require(diagonal, expected, "the diagonal", 1e-7, size)
