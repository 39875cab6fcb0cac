"""Products with J and J^T from a graph that is built once: right for every layer, and without a trace."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from models import CASES, F64, X3, assert_close, build_seeded, draw, mlp, reference_jacobian
from torch import Tensor, nn

from natgrad.families import Bernoulli
from natgrad.ground.pure import Call, PureModel
from natgrad.ground.spaces import Space, trainable
from natgrad.metrics import fisher
from natgrad.operators import Linearization, OutputMap
from natgrad.operators.linearization import PlainKernels
from natgrad.solvers import CG, Direct, SampleSpace


def linearization(model, params, inputs, rows=lambda r: r.flatten(1), after: int | None = None) -> Linearization:
    call = inputs if isinstance(inputs, Call) else Call((inputs,))
    return Linearization(OutputMap(PureModel(model, call), rows), params, after)


@pytest.mark.parametrize("name", CASES)
def test_products_are_those_of_the_jacobian(name):
    case = CASES[name]
    model, params = case.make()
    jacobian = reference_jacobian(model, params, case.inputs, case.family.rows)
    found = linearization(model, params, case.inputs, case.family.rows)
    vector, cotangent = draw(jacobian.shape[2], seed=1), draw(*jacobian.shape[:2], seed=2)
    for _ in range(2):  # the graph serves again
        assert_close(found.jvp(vector), jacobian @ vector, 1e-12)
        assert_close(found.vjp(cotangent), torch.einsum("ima,im->a", jacobian, cotangent), 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_forward_mode_agrees_with_double_backward(name):
    """The universal fallback, asked for directly."""
    case = CASES[name]
    model, params = case.make()
    found = linearization(model, params, case.inputs, case.family.rows)
    vector = draw(found.space.size, seed=1)
    function = PlainKernels(found.function)
    point = {name: p.detach() for name, p in params.items()}
    _, image = torch.func.jvp(function, (point,), (Space(params).unflatten(vector),))
    assert_close(found.jvp(vector), image, 1e-12)


def convolutional(middle: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    def build() -> nn.Module:
        first, second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 2, 2, padding=1)
        return nn.Sequential(first, middle(), second, nn.Tanh(), nn.Flatten(), nn.Linear(50, 2))

    return build_seeded(build)


IMAGES = draw(3, 2, 4, 4, seed=5)


def test_products_of_a_convolutional_net_stay_right_once_its_linearised_form_takes_over():
    model = convolutional()
    params = dict(trainable(model))
    jacobian = reference_jacobian(model, params, IMAGES, lambda r: r)
    found = linearization(model, params, IMAGES, after=3)
    for seed in range(6):
        vector = draw(found.space.size, seed=seed)
        assert_close(found.jvp(vector), jacobian @ vector, 1e-12)


def circular() -> nn.Module:
    def build() -> nn.Module:
        padded = nn.Conv2d(4, 2, 2, padding_mode="circular", padding=1)
        return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), padded, nn.Flatten(), nn.Linear(50, 2))

    return build_seeded(build)


DOUBTFUL = {
    "dropout": lambda: convolutional(lambda: nn.Dropout(0.5)),
    "channel dropout": lambda: convolutional(lambda: nn.Dropout2d(0.5)),
    "circular padding": circular,
    "in-place rectifier": lambda: convolutional(lambda: nn.ReLU(inplace=True)),
    "batch norm, training": lambda: convolutional(lambda: nn.BatchNorm2d(4)),
    "batch norm, evaluation": lambda: convolutional(lambda: nn.BatchNorm2d(4)).eval(),
    "random noise": lambda: convolutional(lambda: Noise()),
}


class Noise(nn.Module):
    """Multiplies by fresh random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return x * torch.rand_like(x)


@pytest.mark.parametrize("name", DOUBTFUL)
def test_linearised_form_is_refused_where_it_is_wrong(name):
    """Every product is right, whichever form is taken, and the global random state stays where it is."""
    model = DOUBTFUL[name]()
    params = dict(trainable(model))
    jacobian = reference_jacobian(model, params, IMAGES, lambda r: r)
    state = torch.get_rng_state()
    found = linearization(model, params, IMAGES, after=3)
    for i in (*range(2, 6), 4, 5):
        unit = torch.zeros(found.space.size, dtype=F64)
        unit[i * 7] = 1.0
        vector = unit if i < 4 else draw(found.space.size, seed=i)
        assert_close(found.jvp(vector), jacobian @ vector, 1e-12)
        assert torch.equal(torch.get_rng_state(), state)


class Cube(torch.autograd.Function):
    """x^3 with a derivative in either direction and no second derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * tangent


def cube_products(params, x: Tensor) -> Tensor:
    return Cube.apply(x @ params["w"])


def test_forward_mode_serves_where_there_is_no_double_backward():
    params = {"w": draw(3, 2).requires_grad_()}
    jacobian = reference_jacobian(cube_products, params, X3, lambda r: r)
    found = linearization(cube_products, params, X3)
    with pytest.warns(UserWarning, match="no double backward"):
        image = found.jvp(draw(6))
    assert_close(image, jacobian @ draw(6), 1e-13)
    assert_close(found.jvp(draw(6, seed=1)), jacobian @ draw(6, seed=1), 1e-13)
    assert_close(found.vjp(draw(4, 2)), torch.einsum("ima,im->a", jacobian, draw(4, 2)), 1e-13)


class OneWay(torch.autograd.Function):
    """Backward only, once."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.filterwarnings("ignore:natgrad")
def test_a_model_without_any_second_way_is_refused_with_both_reasons():
    found = linearization(lambda params, x: OneWay.apply(x @ params["w"]), {"w": draw(3, 2)}, X3)
    with pytest.raises(RuntimeError, match=r"neither double backward .* nor forward-mode .*\['OneWay'\] are"):
        found.jvp(draw(6))


@pytest.mark.parametrize(
    "name", ["dropout", "batch norm, training", "in-place rectifier", "conv2d", "tied", "attention"]
)
def test_nothing_of_the_users_is_touched(name):
    case = CASES[name]
    model, params = case.make()
    loss = model(case.inputs).square().mean()
    loss.backward()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in params.items()}
    modes = [m.training for m in model.modules()]
    state = torch.get_rng_state()
    operator = fisher(model, case.family).at(params, case.inputs)
    vector = draw(operator.size)
    for solver in (CG(), Direct(), SampleSpace()):
        solver.solve(operator, vector, damping=0.1)
    operator.diagonal()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None if gradients[n] is None else torch.equal(p.grad, gradients[n]) for n, p in params.items())
    assert [m.training for m in model.modules()] == modes
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert all(p.requires_grad and p.is_leaf for p in params.values())


USES = {
    "no use": lambda operator: None,
    "a product": lambda operator: operator.mv(draw(operator.size)),
    "a diagonal": lambda operator: operator.diagonal(),
    "a matrix": lambda operator: operator.dense(),
    "cg": lambda operator: CG().solve(operator, draw(operator.size), damping=0.1),
    "sample space": lambda operator: SampleSpace().solve(operator, draw(operator.size), damping=0.1),
}


def test_no_graph_outlives_its_operator():
    left: dict[tuple[str, str], list[weakref.ref[Any]]] = {}
    for name, use in product(("conv2d", "attention"), USES):
        case = CASES[name]
        model, params = case.make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            operator = fisher(model, case.family).at(params, case.inputs)
            result = USES[use](operator)
            left[name, use] = [weakref.ref(operator.linearization.graph), weakref.ref(operator)]
            del operator
        if isinstance(result, Tensor):
            assert result.grad_fn is None, (name, use)
    gc.collect()  # most of a second
    assert [where for where, parts in left.items() if any(part() is not None for part in parts)] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_dtype_of_the_parameters(dtype):
    model = mlp(3, 4, 2).to(dtype)
    operator = fisher(model, Bernoulli()).at(trainable(model), X3.to(dtype))
    vector = torch.ones(operator.size, dtype=dtype)
    assert operator.dtype == (operator @ vector).dtype == operator.diagonal().dtype == dtype
    exact = fisher(mlp(3, 4, 2), Bernoulli()).at(trainable(mlp(3, 4, 2)), X3) @ vector.double()
    assert_close((operator @ vector).double(), exact, 30 * torch.finfo(dtype).eps)
