"""Recurrent modules in float32, which fused kernels hide: the same blocks as in float64, and no trace left behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_state import assert_same_reading, readings
from models import Assembled, assert_close, draw
from optim_models import CE, iterate
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng

X, LABELS = draw(4, 3, 4), torch.tensor([0, 2, 1, 1])
FUSED = torch.backends.mkldnn.is_available()  # an LSTM in float32 is one node of the graph


def build_recurrent(build: Callable[..., Any], lengths: list[int] | None = None, **choices: Any) -> nn.Module:
    """A recurrent module over (b, t, 4), then the sum over positions and a linear layer."""

    def run(m: Any, x: Tensor) -> Tensor:
        first = m.inner.batch_first
        x = x if first else x.transpose(0, 1)
        if lengths is None:
            found = m.inner(x)[0]
        else:
            packed = m.inner(pack_padded_sequence(x, torch.tensor(lengths), batch_first=first))[0]
            found = pad_packed_sequence(packed, batch_first=first)[0]
        return m.out(found.sum(1 if first else 0))

    width = choices.get("proj_size", 3) * (2 if choices.get("bidirectional") else 1)
    return Assembled(run, inner=build(4, 3, **choices), out=nn.Linear(width, 3))


CASES: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: build_recurrent(nn.LSTM),
    "lstm, batch first": lambda: build_recurrent(nn.LSTM, batch_first=True),
    "lstm, two layers, both ways": lambda: build_recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
    "lstm, no biases": lambda: build_recurrent(nn.LSTM, bias=False),
    "lstm, projected": lambda: build_recurrent(nn.LSTM, proj_size=2),
    "lstm, packed": lambda: build_recurrent(nn.LSTM, [3, 3, 2, 1], batch_first=True),
    "gru": lambda: build_recurrent(nn.GRU, num_layers=2),
    "rnn": lambda: build_recurrent(nn.RNN, nonlinearity="relu", batch_first=True),
}


def make(name: str, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name]().to(dtype)


def kernels(tensor: Tensor) -> set[str]:
    """The kinds of nodes in a graph."""
    seen, stack = set(), [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            stack += [child for child, _ in node.next_functions]
    return {node.name() for node in seen}


@pytest.mark.parametrize("name", CASES)
def test_single_precision_reads_what_double_precision_does(name: str):
    found = {}
    for dtype in (torch.float32, torch.float64):
        model = make(name, dtype)
        opt = ng.kfac(model, CE, estimate=ng.ExactLabels() if "packed" not in name else ng.Sampled())
        found[dtype] = readings(opt, model, X.to(dtype), LABELS)
        if dtype is torch.float32:
            iterate(opt, model, X.to(dtype), LABELS)
            assert {row.structure for row in opt.report()} == {"Kronecker"}
    assert_same_reading(found[torch.float32], found[torch.float64].layers, 1e-4)


@pytest.mark.parametrize("name", ["lstm", "gru"])
def test_a_structure_reads_single_precision_too_in_a_pass_of_its_own(name: str):
    found = []
    for dtype in (torch.float32, torch.float64):
        model = make(name, dtype)
        metric = ng.fisher(model, CE)
        found.append(ng.Kronecker().update(None, metric, ng.trainable(model), X.to(dtype))[0])
    assert_close(found[0].diagonal().double(), found[1].diagonal(), 1e-4)


def test_a_pass_that_fails_leaves_the_kernels_as_they_were():
    model = make("lstm", torch.float32)
    opt = ng.kfac(model, CE)
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 3, 7))
    assert torch.backends.mkldnn.enabled
    assert torch.backends.cudnn.enabled
    iterate(opt, model, X.float(), LABELS)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_is_not_listened_to(copied: Any):
    model = nn.LSTM(4, 3)
    opt = ng.kfac(model, ng.Gaussian(), outputs=lambda out: out[0])
    twin = copied(model)
    found = twin(X.float())[0]
    assert not FUSED or "MkldnnRnnLayerBackward0" in kernels(found)
    assert_close(found.detach(), model(X.float())[0].detach(), 1e-5)
    assert opt is not None
