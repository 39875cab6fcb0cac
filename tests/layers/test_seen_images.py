"""A convolution's pass without patches tells what the pass with them tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.ground.spaces import Space
from natgrad.layers.hearing import SeenImages, hear_rows, record_pass
from natgrad.layers.kinds import known_layers
from natgrad.layers.moments import Seen

CALLS = {
    "plain": (lambda: nn.Conv2d(3, 4, 3, padding=1), (5, 3, 6, 6)),
    "stride": (lambda: nn.Conv2d(3, 4, 3, stride=2), (5, 3, 7, 8)),
    "groups": (
        lambda: nn.Conv2d(4, 6, 3, padding="same", padding_mode="circular", groups=2, bias=False),
        (5, 4, 6, 6),
    ),
    "line": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), (5, 3, 15)),
    "volume": (lambda: nn.Conv3d(2, 3, 2), (5, 2, 3, 4, 3)),
    "by channel": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (5, 4, 6, 6)),
    "bias alone": (lambda: freeze_weight(nn.Conv2d(3, 4, 3)), (5, 3, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 4, 2, 1), (5, 3, 4, 5)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), 2, 1, 1, 2, dilation=(1, 2)), (5, 4, 4, 3)),
    "transposed, few taps": (lambda: nn.ConvTranspose2d(3, 4, 2, 3, bias=False), (5, 3, 4, 3)),
    "transposed, cropped": (lambda: nn.ConvTranspose2d(3, 4, 2, 2, 2, 1), (5, 3, 6, 5)),
    "transposed, stride 1": (lambda: nn.ConvTranspose2d(3, 4, 3, 1, 1), (5, 3, 4, 4)),
    "transposed line": (lambda: nn.ConvTranspose1d(4, 2, 3, 2, 1, 1), (5, 4, 6)),
    "transposed volume": (lambda: nn.ConvTranspose3d(2, 3, 3, 2, 1), (5, 2, 3, 2, 3)),
    "transposed, bias alone": (lambda: freeze_weight(nn.ConvTranspose2d(3, 4, 4, 2)), (5, 3, 3, 3)),
}


def freeze_weight(module: nn.Module) -> nn.Module:
    module.weight.requires_grad_(False)
    return module


@pytest.fixture(params=CALLS)
def passes(request: pytest.FixtureRequest):
    """The pass without and with patches, its convolution, and the output."""
    torch.manual_seed(0)
    build, shape = CALLS[request.param]
    module = build().double()
    (layer,) = known_layers(module, Space(ng.trainable(module))).values()
    x = torch.randn(shape, dtype=torch.float64)
    y = module(x)
    derivatives = [torch.randn_like(y) for _ in range(2)]
    assert SeenImages.fits(layer, x, derivatives, 5)
    seen = Seen(layer, layer.activations(x), [layer.deltas(d) for d in derivatives])
    return SeenImages(layer, x, derivatives, y.shape[2:]), seen, module, y


def test_its_gradient_is_autograds(passes):
    images, seen, module, y = passes
    trained = ng.trainable(module)
    found = images.layer.layout.split(images.gradient())
    expected = torch.autograd.grad(y, list(trained.values()), images.derivatives[0])
    assert_close(list(found.values()), [dict(zip(trained, expected, strict=True))[name] for name in found])
    assert_close(images.gradient(), seen.gradient())


def test_patches_that_are_picked_are_rows_of_all(passes):
    images, seen, _, _ = passes
    t = seen.activations.shape[1]
    kept = torch.tensor([0, 3, 4 * t + 1, 2 * t])
    thin = images._pick_patches(kept, t)
    assert_close(thin.activations.flatten(0, 1), seen.activations.flatten(0, 1)[kept])
    scale = (5 * t / 4) ** 0.5
    for found, whole in zip(thin.deltas, seen.deltas, strict=True):
        assert_close(found.flatten(0, 1), scale * whole.flatten(0, 1)[kept])


def test_thinned_to_some_images_they_weigh_as_much_as_all():
    torch.manual_seed(0)
    module = nn.Conv2d(2, 3, 3).double()
    (layer,) = known_layers(module, Space(ng.trainable(module))).values()
    x, derivative = torch.ones(64, 2, 4, 4, dtype=torch.float64), torch.ones(64, 3, 2, 2, dtype=torch.float64)
    thin = SeenImages(layer, x, [derivative], (2, 2)).thin(1.0)
    assert len(thin.activations) < 64
    assert_close(thin.deltas[0].square().sum(), derivative.square().sum())


@pytest.mark.parametrize(
    ("module", "size"),
    [
        # more outputs than by default, and so many that a convolution of them has more entries than the inputs
        (nn.ConvTranspose2d(2, 3, 3, stride=2), (8, 7)),
        (nn.ConvTranspose2d(2, 3, 3, stride=1, output_padding=1, dilation=2), None),
    ],
)
def test_outputs_of_an_unusual_size_are_left_to_patches(module, size):
    (layer,) = known_layers(module, Space(ng.trainable(module))).values()
    x = torch.randn(4, 2, 3, 3)
    y = module(x) if size is None else module(x, output_size=size)
    assert not SeenImages.fits(layer, x, [torch.ones_like(y)], 4)


# norms whose positions are summed before anything is made of them: the scores are those of autograd


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch norm": (lambda: nn.BatchNorm2d(3), (4, 3, 5, 2)),
    "its shift alone": (lambda: freeze(nn.BatchNorm2d(3), "weight"), (4, 3, 5, 2)),
    "layer norm": (lambda: nn.LayerNorm(3), (4, 6, 3)),
    "root mean square": (lambda: nn.RMSNorm(3), (4, 6, 3)),
    "as many positions as cotangents": (lambda: nn.LayerNorm(3), (4, 2, 3)),
}


def freeze(norm: nn.Module, name: str) -> nn.Module:
    norm.get_parameter(name).requires_grad_(False)
    return norm


@pytest.mark.parametrize("case", NORMS)
def test_deltas_times_activations_are_the_scores_of_every_example(case: str) -> None:
    build, shape = NORMS[case]
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    norm = build().double()
    params = {name: p for name, p in norm.named_parameters() if p.requires_grad}
    cotangents = [torch.randn(shape, generator=generator, dtype=torch.float64).flatten(1) for _ in range(2)]

    def run() -> Tensor:
        return norm(inputs).tanh().flatten(1)

    (seen,) = hear_rows(record_pass(norm, Space(params), run), torch.float64, cotangents, shape[0])
    for deltas, cotangent in zip(seen.deltas, cotangents, strict=True):
        scores = torch.einsum("btgo,btgd->bgod", deltas, seen.activations)
        for i in range(shape[0]):
            own = torch.zeros_like(cotangent)
            own[i] = cotangent[i]
            slopes = torch.autograd.grad(run(), list(params.values()), own)
            assert_close(scores[i], seen.layer.layout.join(dict(zip(params, slopes, strict=True))))
