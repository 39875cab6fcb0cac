"""Bags of embeddings have a metric, in every mode: torch's own kernel has a first derivative only."""

from __future__ import annotations

import pytest
import torch
from models import F64, assert_close, build_seeded, draw, reference_jacobian, reference_outputs
from torch import Tensor, nn

from natgrad.families import Categorical
from natgrad.ground.spaces import trainable
from natgrad.metrics import fisher

TOKENS = torch.tensor([[1, 3, 3, 0], [2, 2, 2, 2], [5, 4, 1, 0]])
FLAT, OFFSETS = torch.tensor([1, 3, 3, 0, 5, 2, 1]), torch.tensor([0, 3, 3, 5])  # the second bag is empty
OPTIONS = {
    "rows": (TOKENS, None, {}),
    "padding": (TOKENS, None, {"padding_idx": 0}),
    "negative padding": (TOKENS, None, {"padding_idx": -1}),
    "offsets": (FLAT, OFFSETS, {}),
    "offsets and padding": (FLAT, OFFSETS, {"padding_idx": 3}),
    "last offset included": (FLAT, torch.cat([OFFSETS, torch.tensor([7])]), {"include_last_offset": True}),
    "a bag of padding alone": (torch.full((2, 3), 2), None, {"padding_idx": 2}),
    "norms kept": (TOKENS, None, {"max_norm": 0.5}),
}


class Bags(nn.Module):
    """A bag of embeddings and a layer after it."""

    def __init__(self, weighted: bool, offsets: Tensor | None = None, **options) -> None:
        super().__init__()
        self.bag, self.out, self.weighted = nn.EmbeddingBag(6, 3, **options), nn.Linear(3, 2), weighted
        self.offsets = offsets

    def forward(self, tokens: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 2, tokens.numel(), dtype=F64).view(tokens.shape) if self.weighted else None
        return self.out(torch.tanh(self.bag(tokens, self.offsets, weights)))


CASES = [(name, mode, False) for name in OPTIONS for mode in ("sum", "mean", "max")]
CASES += [(name, "sum", True) for name in OPTIONS]


@pytest.mark.parametrize(("name", "mode", "weighted"), CASES)
def test_the_fisher_of_a_bag_is_its_definition(name, mode, weighted):
    tokens, offsets, options = OPTIONS[name]
    model = build_seeded(lambda: Bags(weighted, offsets, mode=mode, **options))
    model(tokens)  # norms are kept from the first pass on
    params = trainable(model)
    jacobian = reference_jacobian(model, params, tokens, Categorical().rows)
    root = Categorical().root(Categorical().rows(reference_outputs(model, params, tokens)))
    form = root @ root.mT
    expected = torch.einsum("ima,imk,ikb->ab", jacobian, form, jacobian) / len(jacobian)
    metric = fisher(model, Categorical())
    vector = draw(len(expected), seed=3)
    assert_close(metric.at(params, tokens).mv(vector), expected @ vector, 1e-10)
    assert_close(metric.at(params, tokens).dense(), expected, 1e-10)
    assert_close(metric.at(params, tokens).diagonal(), expected.diagonal(), 1e-10)


def test_gradients_by_frequency_are_refused_at_the_door():
    model = build_seeded(lambda: Bags(False, mode="sum", scale_grad_by_freq=True))
    with pytest.raises(ValueError, match="scale_grad_by_freq"):
        fisher(model, Categorical()).at(trainable(model), TOKENS).mv(torch.zeros(26, dtype=F64))
