"""Networks of blocks x + gamma f(norm(x)) with a learned scale gamma per channel, as in ConvNeXt, EVA and Mamba.

While gamma is tiny, everything inside of f is nearly dead: its derivatives are gamma times those of the rest.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CLASSES, SYMBOLS = 4, 8


class ConvBlock(nn.Module):
    """x + gamma perceptron(norm(depthwise convolution of x)), on (b, channels, h, w)."""

    def __init__(self, width: int, gamma: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.gamma = nn.Parameter(torch.full((width,), gamma))

    def forward(self, x: Tensor) -> Tensor:
        inside = self.perceptron(self.norm(self.depthwise(x).movedim(1, -1)))
        return x + (self.gamma * inside).movedim(-1, 1)


class ConvNet(nn.Module):
    """Images (b, 3, 8, 8) -> logits of the classes, the blocks at a quarter of the size."""

    def __init__(self, gamma: float, width: int, layers: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, stride=2)
        self.blocks = nn.Sequential(*(ConvBlock(width, gamma) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((2, 3))))


class AttentionBlock(nn.Module):
    """x + gamma attention(norm x), then x + gamma SwiGLU(norm x), on (b, t, width)."""

    def __init__(self, width: int, gamma: float) -> None:
        super().__init__()
        self.norm1, self.asked, self.mixed = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.gate = nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gamma1, self.gamma2 = (nn.Parameter(torch.full((width,), gamma)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unsqueeze(1) for part in self.asked(self.norm1(x)).chunk(3, dim=-1))
        values = functional.scaled_dot_product_attention(query, key, value, is_causal=True).squeeze(1)
        x = x + self.gamma1 * self.mixed(values)
        inside = self.norm2(x)
        return x + self.gamma2 * self.down(functional.silu(self.gate(inside)) * self.up(inside))


class ScanBlock(nn.Module):
    """x + gamma out(scan(conv(in x)) silu(gate x)), a selective state-space scan on (b, t, width). Gu & Dao 2023."""

    def __init__(self, width: int, gamma: float, state: int = 4) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, 2 * width, bias=False)
        self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
        self.chosen, self.rate = nn.Linear(width, 2 * state, bias=False), nn.Linear(width, width)
        nn.init.constant_(self.rate.bias, -4.0)  # slow at first: softplus(-4) = .018
        self.log_decay = nn.Parameter(torch.arange(1.0, state + 1).log().repeat(width, 1))
        self.through, self.out = nn.Parameter(torch.ones(width)), nn.Linear(width, width, bias=False)
        self.gamma = nn.Parameter(torch.full((width,), gamma))

    def forward(self, x: Tensor) -> Tensor:
        inside, gate = self.inner(self.norm(x)).chunk(2, dim=-1)
        inside = functional.silu(self.conv(inside.mT)[..., : x.shape[1]].mT)
        return x + self.gamma * self.out(self.scan(inside) * functional.silu(gate))

    def scan(self, u: Tensor) -> Tensor:
        """h <- exp(-rate decay) h + rate B u, y = C h + D u, with B, C and the rate chosen by u (b, t, width)."""
        entered, read = self.chosen(u).chunk(2, dim=-1)  # (b, t, state)
        rate = functional.softplus(self.rate(u)).unsqueeze(-1)  # (b, t, width, 1)
        decays, added = (-rate * self.log_decay.exp()).exp(), rate * u.unsqueeze(-1) * entered.unsqueeze(2)
        state, outputs = torch.zeros_like(added[:, 0]), []
        for t in range(u.shape[1]):
            state = decays[:, t] * state + added[:, t]
            outputs.append((state * read[:, t].unsqueeze(1)).sum(-1))
        return torch.stack(outputs, 1) + self.through * u


class SequenceNet(nn.Module):
    """Symbols (b, t) -> logits (b, SYMBOLS, t), with blocks of one kind."""

    def __init__(self, block: type[AttentionBlock] | type[ScanBlock], gamma: float, width: int, layers: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, width)
        self.blocks = nn.Sequential(*(block(width, gamma) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, SYMBOLS)

    def forward(self, symbols: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.symbol(symbols)))).mT


KINDS = ("convolution", "attention", "scan")


def scaled_net(kind: str, gamma: float, small: bool = False) -> nn.Module:
    """A network by the name of its blocks, one of KINDS. small: two blocks of width 16 instead of four of width 48."""
    width, layers = (16, 2) if small else (48, 4)
    if kind == "convolution":
        return ConvNet(gamma, width, layers)
    return SequenceNet({"attention": AttentionBlock, "scan": ScanBlock}[kind], gamma, width, layers)


def scaled_data(kind: str, many: int = 256, length: int = 8) -> tuple[Tensor, Tensor]:
    """Images whose class is that of their brightest quarter, or symbols with the one before as target."""
    generator = torch.Generator().manual_seed(0)
    if kind == "convolution":
        x = torch.randn(many, 3, 8, 8, generator=generator)
        quarters = functional.avg_pool2d(x[:, :1], 4).flatten(1)
        x[:, :1] += 2 * functional.one_hot(quarters.argmax(1), 4).view(many, 1, 2, 2).repeat(1, 1, 4, 4)
        return x, quarters.argmax(1)
    x = torch.randint(SYMBOLS, (many, length), generator=generator)
    return x, x.roll(1, dims=1).where(torch.arange(length) > 0, x)
