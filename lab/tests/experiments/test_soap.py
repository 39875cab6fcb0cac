"""SOAP: Adam where there is no matrix, and the same in every rotation of a matrix's sides."""

import torch
from torch import nn

from natgrad_lab.experiments.contestants import SOAP


def train_parameter(optimizer, parameter, gradients):
    """The parameter after a step along each gradient."""
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def draw_gradients(*shape, many=25):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(many)]


def zeros(*shape):
    return nn.Parameter(torch.zeros(shape, dtype=torch.float64))


def test_a_vector_is_adam_s():
    soap, adam = zeros(4), zeros(4)
    expected = train_parameter(torch.optim.Adam([adam], lr=0.1, betas=(0.95, 0.95)), adam, draw_gradients(4))
    assert torch.allclose(train_parameter(SOAP([soap], 0.1), soap, draw_gradients(4)), expected, atol=1e-12)


def test_sides_too_long_for_a_factor_are_adam_s():
    soap, adam = zeros(4, 5), zeros(4, 5)
    expected = train_parameter(torch.optim.Adam([adam], lr=0.1, betas=(0.95, 0.95)), adam, draw_gradients(4, 5))
    assert torch.allclose(
        train_parameter(SOAP([soap], 0.1, longest=3), soap, draw_gradients(4, 5)), expected, atol=1e-12
    )


def test_steps_turn_with_the_sides_of_a_matrix():
    left, right = (torch.linalg.qr(matrix)[0] for matrix in draw_gradients(5, 5, many=2))
    gradients = [gradient * torch.linspace(1, 4, 5) for gradient in draw_gradients(5, 5)]
    plain, turned = zeros(5, 5), zeros(5, 5)
    expected = left @ train_parameter(SOAP([plain], 0.1), plain, gradients) @ right.mT
    parameter = train_parameter(SOAP([turned], 0.1), turned, [left @ gradient @ right.mT for gradient in gradients])
    assert torch.allclose(parameter, expected, atol=1e-5)  # eps adds 1e-8 to roots that start near it


def test_filters_of_a_convolution_are_rows():
    flat, filters = zeros(4, 9), zeros(4, 1, 3, 3)
    expected = train_parameter(SOAP([flat], 0.1), flat, draw_gradients(4, 9))
    parameter = train_parameter(SOAP([filters], 0.1), filters, [g.view(4, 1, 3, 3) for g in draw_gradients(4, 9)])
    assert torch.equal(parameter.flatten(1), expected)
