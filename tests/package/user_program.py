"""What a user writes, checked by pyright against the installed wheel: annotations are found from outside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import natgrad as ng


def train(model: nn.Module, x: Tensor, y: Tensor, steps: int = 10) -> float:
    opt = ng.kfac(model, nn.CrossEntropyLoss(), lr=1.0)
    for _ in range(steps):
        opt.zero_grad()
        loss: Tensor = opt.loss(model(x), y)
        loss.backward()
        opt.step()
    kl: float = opt.state_report().kl
    assert kl > 0
    return opt.state_report().loss


torch.manual_seed(0)
inputs, labels = torch.randn(64, 4), torch.randint(3, (64,))
network = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
first = train(network, inputs, labels, 1)
last = train(network, inputs, labels)
assert last < first

G: ng.Operator = ng.fisher(network, ng.Categorical()).at(ng.trainable(network), inputs)
dense: Tensor = G.dense()
result = ng.minimize(lambda point: float((point**2).sum()), [1.0, 2.0], 0.5, maxfevals=200, seed=0)
print(ng.__version__, f"{first:.3f} -> {last:.3f}", tuple(dense.shape), float(result.fun))
