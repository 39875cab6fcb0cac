"""Layer kinds: activations and deltas give every example's score, and statistics are those of the scores."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import F64, assert_close, build_seeded, draw
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.linalg import KroneckerEigen
from natgrad.layers import Room, collect_inputs, layer_factors, layer_inputs, moments, record_calls
from natgrad.layers.kinds import BATCH_NORMS, EmbeddingLayer, Layer, known_layers

TOKENS = torch.tensor([[0, 1, 4, 1], [2, 2, 3, 0], [4, 0, 1, 1]])
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")

IMAGE, VOLUME, SIGNAL = draw(3, 4, 5, 6), draw(2, 2, 3, 4, 3), draw(3, 4, 7)

KINDS: dict[str, tuple[Any, Tensor]] = {
    "linear": (lambda: nn.Linear(3, 2), draw(4, 3)),
    "linear without bias": (lambda: nn.Linear(3, 2, bias=False), draw(4, 3)),
    "linear over positions": (lambda: nn.Linear(3, 2), draw(4, 5, 3)),
    "conv1d": (lambda: nn.Conv1d(4, 2, 3, stride=2, padding=1), SIGNAL),
    "conv1d, same, dilated": (lambda: nn.Conv1d(4, 2, 2, dilation=2, padding="same"), SIGNAL),
    "conv2d": (lambda: nn.Conv2d(4, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), IMAGE),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, padding=1), IMAGE),
    "conv2d, depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), IMAGE),
    "conv2d, same, even kernel": (lambda: nn.Conv2d(4, 2, (2, 4), padding="same"), IMAGE),
    "conv2d, circular": (lambda: nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"), IMAGE),
    "conv2d, reflect, same": (lambda: nn.Conv2d(4, 2, 4, padding="same", padding_mode="reflect"), IMAGE),
    "conv2d, replicate, stride": (lambda: nn.Conv2d(4, 2, 3, 2, padding=(2, 1), padding_mode="replicate"), IMAGE),
    "conv3d": (lambda: nn.Conv3d(2, 4, (2, 3, 1), stride=(1, 2, 1), padding=1, groups=2), VOLUME),
    "transposed conv1d": (lambda: nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=1), SIGNAL),
    "transposed conv2d": (lambda: nn.ConvTranspose2d(4, 6, (3, 2), 2, 1, groups=2, dilation=(1, 2)), IMAGE),
    "transposed conv3d": (lambda: nn.ConvTranspose3d(2, 3, 2, stride=2), VOLUME),
    "embedding": (lambda: nn.Embedding(6, 3), TOKENS),
    "embedding of one token": (lambda: nn.Embedding(6, 3), TOKENS[:, 0]),
    "embedding with padding": (lambda: nn.Embedding(6, 3, padding_idx=1), TOKENS),
    "layer norm": (lambda: nn.LayerNorm(3), draw(4, 5, 3)),
    "layer norm over two dimensions": (lambda: nn.LayerNorm((2, 3)), draw(4, 2, 3)),
    "layer norm without bias": (lambda: nn.LayerNorm(3, bias=False), draw(4, 3)),
    "rms norm": (lambda: nn.RMSNorm(3), draw(4, 2, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGE),
    "batch norm, evaluation": (lambda: nn.BatchNorm2d(4).eval(), IMAGE),
    "batch norm, training": (lambda: nn.BatchNorm1d(4), SIGNAL),
}


def moved_off_start(module: nn.Module) -> nn.Module:
    """Away from scales of one and shifts of zero, and batch statistics away from theirs."""
    for i, tensor in enumerate([*module.parameters(), *module.buffers()]):
        if tensor.is_floating_point():
            tensor.data.add_(0.3 * draw(*tensor.shape, seed=20 + i).abs())
    return module


def case(name: str, frozen: str = "") -> tuple[nn.Module, Layer, Tensor, Tensor]:
    """The module, its layer, its input and a cotangent on its output."""
    build, inputs = KINDS[name]
    module = moved_off_start(build_seeded(build))
    for parameter, p in module.named_parameters():
        p.requires_grad_(parameter != frozen)
    layer = known_layers(module, ng.Space(ng.trainable(module)))[module]
    outputs = copy.deepcopy(module)(inputs)
    return module, layer, inputs, draw(*outputs.shape, seed=7)


def scores(module: nn.Module, layer: Layer, inputs: Tensor, cotangent: Tensor) -> Tensor:
    """Every example's gradient of <cotangent, output>, as the layer's matrix, (b, groups, outputs, columns).

    Examples one by one, except that a batch norm in training mode sees them all.
    """
    params, found = ng.trainable(module), []
    for i in range(len(inputs)):
        own = slice(i, i + 1)
        value = module(inputs)[own] if isinstance(module, BATCH_NORMS) else module(inputs[own])
        gradients = torch.autograd.grad(value, list(params.values()), cotangent[own])
        found.append(layer.layout.join(dict(zip(params, gradients, strict=True))))
    return torch.stack(found)


def seen_of(layer: Layer, inputs: Tensor, cotangent: Tensor) -> moments.Seen:
    return moments.Seen(layer, layer.activations(inputs), [layer.deltas(cotangent)])


def written_out(seen: moments.Seen) -> Tensor:
    """sum_t delta a^T per example, tokens written out as unit vectors."""
    if not seen.by_token:
        return torch.einsum("btgo,btgd->bgod", seen.deltas[0], seen.activations)
    unit = nn.functional.one_hot(seen.activations, seen.layer.layout.outputs).to(F64)
    if seen.padding is not None:
        unit[..., seen.padding] = 0
    return torch.einsum("btv,bte->bve", unit, seen.deltas[0]).unsqueeze(1)


@pytest.mark.parametrize("name", KINDS)
def test_activations_and_deltas_give_every_example_s_score(name: str):
    module, layer, inputs, cotangent = case(name)
    seen = seen_of(layer, inputs, cotangent)
    expected = scores(module, layer, inputs, cotangent)
    assert_close(written_out(seen), expected, 1e-13)
    assert_close(seen.gradient(), expected.sum(0), 1e-13)


@pytest.mark.parametrize("name", KINDS)
def test_a_subclass_is_of_its_kind_unless_it_has_a_forward_of_its_own(name: str):
    module, layer, *_ = case(name)
    kind, space = type(module), ng.Space(ng.trainable(module))
    module.__class__ = type("Own", (kind,), {})
    (found,) = known_layers(module, space).values()
    assert (type(found), found.layout) == (type(layer), layer.layout)
    module.__class__ = type("Scaled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    assert known_layers(module, space) == {}


def test_a_layer_with_a_parametrized_weight_is_none():
    module = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    assert known_layers(module, ng.Space(ng.trainable(module))) == {}


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["linear", "conv2d, groups", "transposed conv2d", "layer norm"])
def test_a_frozen_part_of_a_layer_is_left_out(name: str, frozen: str):
    module, layer, inputs, cotangent = case(name, frozen)
    assert layer.layout.names == tuple(ng.trainable(module))
    assert_close(written_out(seen_of(layer, inputs, cotangent)), scores(module, layer, inputs, cotangent), 1e-13)


@pytest.mark.parametrize("name", KINDS)
def test_a_layout_takes_tensors_apart_as_it_joined_them(name: str):
    module, layer, _, _ = case(name)
    params = {key: p.detach() for key, p in ng.trainable(module).items()}
    matrix = layer.layout.join(params)
    assert tuple(matrix.shape) == layer.layout.matrix_shape
    again = layer.layout.split(matrix)
    assert all(torch.equal(again[key], p) for key, p in params.items())
    places = layer.layout.places
    assert (places is None) == (layer.layout.channels is not None and layer.layout.groups > 1)
    for key, place in (places or {}).items():
        assert torch.equal(matrix.contiguous().as_strided(*place), params[key])


@pytest.mark.parametrize("name", KINDS)
def test_statistics_are_second_moments_of_the_scores(name: str):
    module, layer, inputs, cotangent = case(name)
    seen, g = seen_of(layer, inputs, cotangent), scores(module, layer, inputs, cotangent)
    a, deltas = seen.activations, seen.deltas[0]
    if isinstance(layer, EmbeddingLayer):
        size, g = layer.layout.outputs, g[:, 0]
        assert_close(moments.token_squares(a, deltas, size, seen.padding), g.square().sum(0), 1e-13)
        blocks = torch.einsum("bve,bvf->vef", g, g)
        assert_close(moments.token_blocks(a, deltas, size, seen.padding), blocks, 1e-13)
        expected = nn.functional.one_hot(a, size).to(F64).flatten(0, 1).sum(0)
        if seen.padding is not None:
            expected[seen.padding] = 0
        assert_close(moments.token_moment(a, size, seen.padding, F64), expected, 1e-15)
        return
    assert_close(moments.squares(a, deltas), g.square().sum(0), 1e-13)
    assert_close(moments.unit_blocks(a, deltas), torch.einsum("bgod,bgoe->gode", g, g).flatten(0, 1), 1e-13)
    if layer.layout.bias is not None:
        assert_close(moments.bias_rows(a, deltas), (g * g[..., -1:]).sum(0), 1e-13)
    eigen = KroneckerEigen.of(moments.output_moment(deltas), moments.input_moment(a))
    assert eigen.left_vectors is not None
    assert eigen.right_vectors is not None
    turned = eigen.left_vectors.mT @ g @ eigen.right_vectors
    assert_close(moments.rotated_squares(a, deltas, eigen), turned.square().sum(0), 1e-12)


@pytest.mark.parametrize("name", KINDS)
def test_inputs_alone_have_the_moment_of_the_whole_pass(name: str):
    module, layer, inputs, cotangent = case(name)
    with record_calls({module: layer}) as taps:
        module(inputs)
    seen, whole = collect_inputs(taps), seen_of(layer, inputs, cotangent)
    if whole.single:
        assert not seen
        return
    (alone,) = seen
    assert alone.positions == whole.positions
    expected = layer_factors(whole, False, Room(8192, 2**28))
    found = layer_inputs(alone, False, Room(8192, 2**28), F64)
    assert found.keys() == ({"left", "counts"} if whole.by_token else {"right", "counts"})
    for side, moment in found.items():
        assert_close(moment, expected[side], 1e-13)
    if not whole.by_token:
        assert float(alone.bound_inputs()) >= float(whole.bound_inputs()) * (1 - 1e-12)
        few = layer_inputs(alone.thin(2 * whole.positions), False, Room(8192, 2**28))["right"]  # all rows
        assert_close(few, expected["right"], 1e-13)
