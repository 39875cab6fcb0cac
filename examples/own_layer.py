"""A layer of your own gets K-FAC's blocks: y = x W, with the matrix stored the other way round."""

import torch
from torch import Tensor, nn

import natgrad as ng


class Projection(nn.Module):
    """y = x W + b, W (inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.shift = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """(b, inputs) -> (b, outputs)."""
        return torch.einsum("bi,io->bo", x, self.matrix) + self.shift


ng.layers.register(Projection, weight="matrix", bias="shift", transposed=True)

torch.manual_seed(0)
x = torch.rand(256, 2) * 4 - 2
y = (x.square().sum(1) < 2).long()
model = nn.Sequential(Projection(2, 32), nn.Tanh(), Projection(32, 2))
opt = ng.kfac(model, nn.CrossEntropyLoss())
for _ in range(30):
    opt.zero_grad()
    loss = opt.loss(model(x), y)
    loss.backward()
    opt.step()
print(opt.report())
print(f"loss after 30 steps: {loss.item():.3f}")
