"""Train a classifier with the natural gradient: like torch.optim.LBFGS, a step may evaluate the loss again."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import natgrad as ng

torch.manual_seed(0)
table = load_digits()
x, y = torch.tensor(table.data / 16, dtype=torch.float32), torch.tensor(table.target)
x_test, y_test, x, y = x[1437:], y[1437:], x[:1437], y[:1437]  # the last 360 were written by other people

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
opt = ng.hessian_free(model, nn.CrossEntropyLoss(), lr=1.0)


def closure() -> torch.Tensor:
    opt.zero_grad()
    loss = opt.loss(model(x), y)
    loss.backward()
    return loss


for step in range(15):
    loss = opt.step(closure)
    report = opt.state_report()
    print(f"step {step:2d}  loss {loss:.5f}  moved {report.kl:.4f} nats  damping {report.damping:.1e}")

with torch.no_grad():
    errors = (model(x_test).argmax(1) != y_test).float().mean()
print(f"test error {errors:.1%}")
