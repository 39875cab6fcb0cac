"""Few labels, many inputs: the gradient comes from the labelled ones, the metric from all of them."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import natgrad as ng

table = load_digits()
x, y = torch.tensor(table.data / 16, dtype=torch.float32), torch.tensor(table.target)
labelled, test = slice(0, 100), slice(1437, None)


def train(unlabelled: bool) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 30), nn.Tanh(), nn.Linear(30, 10))
    opt = ng.hessian_free(model, nn.CrossEntropyLoss())
    for _ in range(10):
        if unlabelled:
            opt.observe(x[:1437])  # no labels: the exact Fisher metric needs inputs only
        opt.zero_grad()
        opt.loss(model(x[labelled]), y[labelled]).backward()
        opt.step()
    with torch.no_grad():
        return float((model(x[test]).argmax(1) != y[test]).float().mean())


# Try it on your data: which of the two is better is an open question, not a promise.
print(f"test error, metric on the 100 labelled digits: {train(unlabelled=False):.1%}")
print(f"test error, metric on all 1437 inputs:         {train(unlabelled=True):.1%}")
