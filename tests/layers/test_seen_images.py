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


def freeze(module: nn.Module) -> nn.Module:
    """Its bias alone is trained."""
    module.get_parameter("weight").requires_grad_(False)
    return module


CIRCULAR = {"padding": "same", "padding_mode": "circular", "groups": 2, "bias": False}
CALLS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(3, 4, 3, padding=1), (5, 3, 6, 6)),
    "stride": (lambda: nn.Conv2d(3, 4, 3, stride=2), (5, 3, 7, 8)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, **CIRCULAR), (5, 4, 6, 6)),
    "line": (lambda: nn.Conv1d(3, 4, 3, stride=2, padding=1, dilation=2), (5, 3, 15)),
    "volume": (lambda: nn.Conv3d(2, 3, 2), (5, 2, 3, 4, 3)),
    "by channel": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (5, 4, 6, 6)),
    "bias alone": (lambda: freeze(nn.Conv2d(3, 4, 3)), (5, 3, 6, 6)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 4, 2, 1), (5, 3, 4, 5)),
    "transposed, groups": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), 2, 1, 1, 2, dilation=(1, 2)), (5, 4, 4, 3)),
    "transposed, few taps": (lambda: nn.ConvTranspose2d(3, 4, 2, 3, bias=False), (5, 3, 4, 3)),
    "transposed, cropped": (lambda: nn.ConvTranspose2d(3, 4, 2, 2, 2, 1), (5, 3, 6, 5)),
    "transposed, stride 1": (lambda: nn.ConvTranspose2d(3, 4, 3, 1, 1), (5, 3, 4, 4)),
    "transposed line": (lambda: nn.ConvTranspose1d(4, 2, 3, 2, 1, 1), (5, 4, 6)),
    "transposed volume": (lambda: nn.ConvTranspose3d(2, 3, 3, 2, 1), (5, 2, 3, 2, 3)),
    "transposed, bias alone": (lambda: freeze(nn.ConvTranspose2d(3, 4, 4, 2)), (5, 3, 3, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_pass_without_patches_tells_what_the_pass_with_them_does(name: str):
    """Its gradient is autograd's, and patches that are picked are rows of all."""
    torch.manual_seed(0)
    build, shape = CALLS[name]
    module = build().double()
    trained = ng.trainable(module)
    (layer,) = known_layers(module, Space(trained)).values()
    x = torch.randn(shape, dtype=torch.float64)
    y = module(x)
    derivatives = [torch.randn_like(y) for _ in range(2)]
    assert SeenImages.fits(layer, x, derivatives, 5)
    seen = Seen(layer, layer.activations(x), [layer.deltas(d) for d in derivatives])
    images = SeenImages(layer, x, derivatives, y.shape[2:])
    found = images.layer.layout.split(images.gradient())
    expected = torch.autograd.grad(y, list(trained.values()), images.derivatives[0])
    assert_close(list(found.values()), [dict(zip(trained, expected, strict=True))[name] for name in found])
    assert_close(images.gradient(), seen.gradient())
    t = seen.activations.shape[1]
    kept = torch.tensor([0, 3, 4 * t + 1, 2 * t])
    thin = images._pick_patches(kept, t)
    assert_close(thin.activations.flatten(0, 1), seen.activations.flatten(0, 1)[kept])
    for few, whole in zip(thin.deltas, seen.deltas, strict=True):
        assert_close(few.flatten(0, 1), (5 * t / 4) ** 0.5 * whole.flatten(0, 1)[kept])


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
    "its shift alone": (lambda: freeze(nn.BatchNorm2d(3)), (4, 3, 5, 2)),
    "layer norm": (lambda: nn.LayerNorm(3), (4, 6, 3)),
    "root mean square": (lambda: nn.RMSNorm(3), (4, 6, 3)),
    "as many positions as cotangents": (lambda: nn.LayerNorm(3), (4, 2, 3)),
}


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
