"""Derivatives of third order, where torch's own norms are wrong: against the norm by hand and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_close, build_seeded, draw, pair
from optim_models import Interrupt
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack

import natgrad as ng

Function = Callable[[Tensor], Tensor]


def by_hand(x: Tensor, dims: tuple[int, ...], weight: Tensor | None, bias: Tensor | None, shape: Any = None) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-5) * weight + bias."""
    mean = x.mean(dims, keepdim=True)
    found = (x - mean) / torch.sqrt(((x - mean) ** 2).mean(dims, keepdim=True) + 1e-5)
    found = found if weight is None else found * weight.reshape(shape or weight.shape)
    return found if bias is None else found + bias.reshape(shape or bias.shape)


W, V = draw(12, seed=5), draw(12, seed=6)
images = (-1, 3, 2, 2)
heads = (-1, 1, 3, 4)


def attend(h: Tensor) -> Tensor:
    q = h.view(heads)
    return functional.scaled_dot_product_attention(q, 0.7 * q, q.tanh())


def attend_by_hand(h: Tensor) -> Tensor:
    q = h.view(heads)
    return torch.softmax(q @ (0.7 * q).mT / 2, -1) @ q.tanh()


# name -> torch's function of h (b, 12), and the same by hand
CASES: dict[str, tuple[Function, Function]] = {
    "layer_norm": (lambda h: functional.layer_norm(h, (12,)), lambda h: by_hand(h, (-1,), None, None)),
    "layer_norm, affine": (lambda h: functional.layer_norm(h, (12,), W, V), lambda h: by_hand(h, (-1,), W, V)),
    "layer_norm, weight": (lambda h: functional.layer_norm(h, [12], W), lambda h: by_hand(h, (-1,), W, None)),
    "layer_norm, bias by name": (
        lambda h: functional.layer_norm(h, normalized_shape=(12,), bias=V),
        lambda h: by_hand(h, (-1,), None, V),
    ),
    "layer_norm, groups": (
        lambda h: functional.layer_norm(h.view(-1, 3, 4), (4,)),
        lambda h: by_hand(h.view(-1, 3, 4), (-1,), None, None),
    ),
    "layer_norm, two axes": (
        lambda h: functional.layer_norm(h.view(-1, 3, 4), (3, 4), W.view(3, 4), V.view(3, 4)),
        lambda h: by_hand(h.view(-1, 3, 4), (-2, -1), W.view(3, 4), V.view(3, 4)),
    ),
    "torch.layer_norm": (lambda h: torch.layer_norm(h, (12,), W), lambda h: by_hand(h, (-1,), W, None)),
    "torch.native_layer_norm": (
        lambda h: torch.native_layer_norm(h, (12,), W, V, 1e-5)[0],
        lambda h: by_hand(h, (-1,), W, V),
    ),
    "group_norm": (
        lambda h: functional.group_norm(h.view(images), 3, W[:3], V[:3]),
        lambda h: by_hand(h.view(images), (2, 3), W[:3], V[:3], (3, 1, 1)),
    ),
    "instance_norm": (
        lambda h: functional.instance_norm(h.view(images), weight=W[:3], bias=V[:3]),
        lambda h: by_hand(h.view(images), (2, 3), W[:3], V[:3], (3, 1, 1)),
    ),
    "torch.instance_norm": (
        lambda h: torch.instance_norm(h.view(images), None, None, None, None, True, 0.1, 1e-5, True),
        lambda h: by_hand(h.view(images), (2, 3), None, None),
    ),
    "batch_norm, training": (
        lambda h: functional.batch_norm(h, None, None, W, V, training=True),
        lambda h: by_hand(h, (0,), W, V),
    ),
    "batch_norm, training, images": (
        lambda h: functional.batch_norm(h.view(images), None, None, W[:3], V[:3], training=True),
        lambda h: by_hand(h.view(images), (0, 2, 3), W[:3], V[:3], (3, 1, 1)),
    ),
    "torch.batch_norm, training": (
        lambda h: torch.batch_norm(h.view(images), None, None, None, None, True, 0.1, 1e-5, True),
        lambda h: by_hand(h.view(images), (0, 2, 3), None, None),
    ),
    "batch_norm, evaluation": (
        lambda h: functional.batch_norm(h, W, V.abs() + 0.5, V, W),
        lambda h: (h - W) / torch.sqrt(V.abs() + 0.5 + 1e-5) * V + W,
    ),
    "rms_norm": (
        lambda h: functional.rms_norm(h, (12,), W, 1e-5),
        lambda h: h / torch.sqrt((h**2).mean(-1, keepdim=True) + 1e-5) * W,
    ),
    "attention": (attend, attend_by_hand),
    "cdist": (
        lambda h: torch.cdist(h.view(-1, 3, 4), W.view(3, 4)),
        lambda h: (h.view(-1, 3, 1, 4) - W.view(3, 4)).square().sum(-1).sqrt(),
    ),
    "weight_norm": (
        lambda h: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).parametrizations.weight[0](W[:2, None], h),  # pyright: ignore
        lambda h: h / torch.linalg.vector_norm(h, dim=1, keepdim=True) * W[:2, None],
    ),
}
X, TURN = draw(2, 3, seed=1), draw(12, 3, seed=2)


def third(layer: Function, turn: Tensor) -> Tensor:
    """mean over X of |s|^2 / 2 + tr H, s and H the derivatives in x of a function with `layer` inside."""
    x = X.clone().requires_grad_()
    outputs = torch.tanh(layer(x @ turn.mT).reshape(len(X), -1))
    value = (outputs @ draw(outputs.shape[1], seed=3)).sum()
    (score,) = torch.autograd.grad(value, x, create_graph=True)
    bends = [torch.autograd.grad(score[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(3)]
    return (0.5 * score.square().sum(1) + torch.stack(bends).sum(0)).mean()


@pytest.mark.parametrize("name", CASES)
def test_three_derivatives_are_those_of_the_operation_by_hand(name):
    theirs, ours = CASES[name]
    turn = TURN.clone().requires_grad_()
    with ng.exact_derivatives():
        assert_close(theirs(X @ TURN.mT), ours(X @ TURN.mT), 1e-10)
        found = third(theirs, turn)
    expected = third(ours, turn)
    assert_close(found.detach(), expected.detach(), 1e-10)
    gradients = [torch.autograd.grad(value, turn)[0] for value in (found, expected)]
    assert_close(*gradients, 1e-10)
    step, way = 1e-5, draw(12, 3, seed=4)
    difference = (third(ours, TURN + step * way) - third(ours, TURN - step * way)) / (2 * step)
    assert_close((gradients[0] * way).sum(), difference, 1e-5, scale=float(gradients[0].norm() * way.norm()))


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    axes=st.integers(1, 4),
    eps=st.sampled_from([1e-5, 1e-2]),
    affine=st.booleans(),
    seed=st.integers(0, 99),
)
def test_fuzz_layer_norms_have_torch_s_values_and_slopes(shape, axes, eps, affine, seed):
    ending = tuple(shape[-axes:])
    x = draw(*shape, seed=seed).requires_grad_()
    weight, bias = (draw(*ending, seed=seed + i) if affine else None for i in (1, 2))
    found, slopes = [], []
    for within in (False, True):
        if within:
            with ng.exact_derivatives():
                y = functional.layer_norm(x, ending, weight, bias, eps)
        else:
            y = functional.layer_norm(x, ending, weight, bias, eps)
        found.append(y.detach())
        slopes.append(torch.autograd.grad((y * draw(*shape, seed=seed + 3)).sum(), x)[0])
    assert_close(found[1], found[0], 1e-9, scale=10.0)
    assert_close(slopes[1], slopes[0], 1e-9, scale=1e3)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_running_statistics_are_updated_once(kind):
    plain, within = (kind(3, affine=True, track_running_stats=True).double() for _ in range(2))
    x = draw(5, 3, 2, 2)
    expected = plain(x)
    with ng.exact_derivatives(), ng.exact_derivatives():
        assert_close(within(x).detach(), expected.detach(), 1e-10)
    for mine, theirs in zip(within.buffers(), plain.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    within.eval()
    plain.eval()
    with ng.exact_derivatives():
        assert torch.equal(within(x), plain(x))


class Hand(nn.Module):
    """A norm by hand with torch's parameters: layer norm, group norm and instance norm of (b, 6)."""

    def __init__(self, groups: int, by_channel: bool) -> None:
        super().__init__()
        self.groups = groups
        self.weight, self.bias = (nn.Parameter(torch.ones(groups if by_channel else 6)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        parts = by_hand(x.view(len(x), self.groups, -1), (-1,), None, None)
        if self.weight.numel() == 6:
            return parts.flatten(1) * self.weight + self.bias
        return (parts * self.weight.view(-1, 1) + self.bias.view(-1, 1)).flatten(1)


def shape_around(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (2, 3)), norm, nn.Flatten())


NORMS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
    "LayerNorm": (lambda: nn.LayerNorm(6), lambda: Hand(1, by_channel=False)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), lambda: Hand(2, by_channel=False)),
    "InstanceNorm1d": (lambda: shape_around(nn.InstanceNorm1d(2, affine=True)), lambda: ShapedHand()),
}


class ShapedHand(nn.Sequential):
    """With the same names of parameters as `shape_around`."""

    def __init__(self) -> None:
        super().__init__(nn.Identity(), Hand(2, by_channel=True), nn.Identity())


def energies(name: str, first: bool) -> tuple[nn.Module, nn.Module]:
    """An energy with torch's norm, and one by hand, with the same parameters."""
    nets = []
    for make in NORMS[name]:
        before = [] if first else [nn.Softplus()]
        make_net = lambda make=make, before=before: nn.Sequential(  # noqa: E731
            nn.Linear(3, 6), *before, make(), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1)
        )
        nets.append(build_seeded(make_net))
    state = {key: p + 0.3 * draw(*p.shape, seed=i) for i, (key, p) in enumerate(nets[0].state_dict().items())}
    for net in nets:
        net.load_state_dict(state)
    return nets[0], nets[1]


def seed() -> torch.Generator:
    return torch.Generator().manual_seed(0)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "exact": ng.score_matching_loss,
    "in chunks": lambda *a: ng.score_matching_loss(*a, chunk_size=1),
    "masked": lambda *a: ng.score_matching_loss(*a, mask=torch.tensor([True, False, True])),
    "sliced": lambda *a: ng.sliced_score_matching_loss(*a, slices=2, generator=seed()),
    "sliced, plain": lambda *a: ng.sliced_score_matching_loss(*a, variance_reduced=False, generator=seed()),
    "denoising": lambda *a: ng.denoising_score_matching_loss(*a, noise=0.3, generator=seed()),
}


@pytest.mark.parametrize(("loss", "name"), [*pair(LOSSES, NORMS), *pair(["exact", "in chunks", "sliced"], NORMS)])
@pytest.mark.parametrize("first", [True, False], ids=["norm of a linear map", "norm of an activation"])
def test_losses_of_energies_with_norms_have_the_gradient_of_the_norm_by_hand(loss, name, first):
    found = []
    for net in energies(name, first):
        params = ng.trainable(net)
        value = LOSSES[loss](net, params, draw(5, 3, seed=8))
        found.append((value, torch.autograd.grad(value, list(params.values()), materialize_grads=True)))
    assert_close(found[0][0].detach(), found[1][0].detach(), 1e-10)
    for mine, theirs in zip(found[0][1], found[1][1], strict=True):
        assert_close(mine, theirs, 1e-8, scale=1.0)


@pytest.mark.parametrize(("options", "name"), pair([{}, {"slices": 2}, {"chunk_size": 2}], NORMS), ids=repr)
def test_metrics_of_energies_with_norms_are_those_of_the_norm_by_hand(options, name):
    matrices = []
    for net in energies(name, first=False):
        G = ng.score_metric(net, **options).at(ng.trainable(net), draw(5, 3, seed=8))
        v = draw(G.size, seed=9)
        matrices.append(G.dense())
        assert_close(G @ v, matrices[-1] @ v, 1e-9)
        root = G.root()
        assert root is not None
        assert_close(root @ root.mT, matrices[-1], 1e-9)
    assert_close(*matrices, 1e-9)


def test_a_function_of_one_example_and_a_regression_of_scores_too():
    net, hand = energies("LayerNorm", first=False)
    found = []
    for module in (net, hand):
        params = ng.trainable(module)

        def log_p(params: Any, x: Tensor, module: nn.Module = module) -> Tensor:
            return -functional_call(module, params, (x.unsqueeze(0),)).squeeze()

        value = ng.score_matching_loss(log_p, params, draw(5, 3, seed=8))
        regression = (ng.Score(module)(draw(5, 3, seed=8)) - 1).square().sum()
        found.append(
            [torch.autograd.grad(v, list(params.values()), materialize_grads=True) for v in (value, regression)]
        )
    for mine, theirs in zip(found[0], found[1], strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_close(a, b, 1e-8, scale=1.0)


def test_ctrl_c_at_any_line_leaves_later_derivatives_exact():
    x = draw(2, 3).requires_grad_()

    def is_written_out() -> bool:
        with ng.exact_derivatives():
            return "LayerNorm" not in type(functional.layer_norm(x, (3,)).grad_fn).__name__

    assert "LayerNorm" in type(functional.layer_norm(x, (3,)).grad_fn).__name__
    before = len(_get_current_function_mode_stack())
    with Interrupt(0) as whole:
        assert is_written_out()
    for n in range(1, whole.seen + 1):
        with Interrupt(n):
            is_written_out()
        assert is_written_out(), f"line {n}"
        assert len(_get_current_function_mode_stack()) == before, f"line {n}"
