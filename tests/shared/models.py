"""Small models, inputs and references that several tests share. Float64 throughout."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from natgrad.families import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Likelihood, Poisson
from natgrad.ground.spaces import trainable
from natgrad.operators import Operator

F64 = torch.float64


def tensor(values: Any) -> Tensor:
    """Numbers in float64."""
    return torch.tensor(values, dtype=F64)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def assert_close(found: Tensor, expected: Tensor, rtol: float = 1e-12, scale: Tensor | float | None = None) -> None:
    """The largest error is within rtol of the largest entry (or of `scale`)."""
    assert found.shape == expected.shape
    allowed = rtol * float(expected.abs().max() if scale is None else scale)
    error = float((found - expected).detach().abs().max()) if expected.numel() else 0.0
    assert error <= allowed + 1e-300, f"off by {error:.3g}, allowed {allowed:.3g}"


def pair(names: Iterable[Any], others: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Every name and every other at least once, in turn; the whole product is minutes of the same facts."""
    names, others = list(names), list(others)
    count = max(len(names), len(others))
    return [(names[i % len(names)], others[i % len(others)]) for i in range(count)]


def cross(whole: Iterable[Any], rest: Iterable[Any], cases: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each of `whole` with every case. The rest, whose way through the code is theirs, have a case each, in turn."""
    cases = list(cases)
    some = [(each, cases[2 * i % len(cases)]) for i, each in enumerate(rest)]
    return [(each, case) for each in whole for case in cases] + some


def build_seeded(build: Callable[[], nn.Module]) -> nn.Module:
    """A module in float64 whose start does not depend on what ran before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return build().double()


def mlp(*widths: int) -> nn.Module:
    """Linear layers with tanh in between."""

    def build() -> nn.Module:
        layers = [layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1])

    return build_seeded(build)


class Assembled(nn.Module):
    """Named parts, and a function of the model and its inputs that says what is done with them."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """What the function makes of the inputs."""
        return self.function(self, *inputs, **named)


class Sequence(nn.Module):
    """Tokens -> embedding -> normalised linear layers -> logits for every position, (b, t) -> (b, t, c)."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.out = nn.Linear(4, 5)
        if tied:
            self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(b, t) -> (b, t, 5)."""
        return self.out(torch.tanh(self.hidden(self.norm(self.embedding(tokens)))))


class Attention(nn.Module):
    """One head of fused attention over positions, (b, t, 4) -> (b, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """(b, t, 4) -> (b, 3)."""
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).mean(1))


def build_twice() -> nn.Module:
    """The same layer used twice, one after the other."""
    return Assembled(lambda m, x: m.out(m.inner(torch.tanh(m.inner(x)))), inner=nn.Linear(3, 3), out=nn.Linear(3, 2))


def build_named_twice() -> nn.Module:
    """The same block at two places of the model, so that all its parameters have two names."""
    block = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return nn.Sequential(block, block, nn.Linear(3, 2))


class Tied(nn.Module):
    """Encoder and decoder with one weight, (b, 3) -> (b, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(3, 3)
        self.decode = nn.Linear(3, 3)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        """(b, 3) -> (b, 3)."""
        return self.decode(torch.tanh(self.encode(x)))


def build_sneaky() -> nn.Module:
    """A parameter used by its layer and once more behind the layer's back."""
    return Assembled(
        lambda m, x: m.out(torch.tanh(m.inner(x)) @ m.inner.weight), inner=nn.Linear(3, 3), out=nn.Linear(3, 2)
    )


def build_unreached() -> nn.Module:
    """A layer whose output is not used."""
    return Assembled(lambda m, x: m.used(x), used=nn.Linear(3, 2), unused=nn.Linear(3, 2))


def build_scale() -> nn.Module:
    """A bare parameter beside a layer."""
    return Assembled(
        lambda m, x: m.scale * torch.tanh(m.layer(x)),
        scale=nn.Parameter(torch.tensor([0.5, 1.5])),
        layer=nn.Linear(3, 2),
    )


def build_checkpointed() -> nn.Module:
    """Activations that are computed again in the backward pass, (b, 3) -> (b, 2)."""
    return Assembled(
        lambda m, x: m.out(checkpoint(m.inner, x, use_reentrant=False)),
        inner=nn.Sequential(nn.Linear(3, 4), nn.Tanh()),
        out=nn.Linear(4, 2),
    )


@dataclass(frozen=True)
class Case:
    """A model, its inputs and a family for its outputs. `mixes`: one example's output depends on the others."""

    build: Callable[[], Any]
    inputs: Any
    family: Likelihood = Categorical()
    mixes: bool = False

    def make(self) -> tuple[Any, dict[str, Tensor]]:
        """The model and its parameters."""
        if self.build in FUNCTIONS:
            return self.build, {"w": draw(3, 2, seed=8).requires_grad_(), "b": draw(2, seed=9).requires_grad_()}
        model = build_seeded(self.build)
        return model, dict(trainable(model))


def affine(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """A plain function of a dict of tensors."""
    return torch.tanh(x @ params["w"]) + params["b"]


FUNCTIONS = (affine,)


def in_place() -> nn.Module:
    """Rectifiers that write over their inputs."""
    return nn.Sequential(
        nn.Linear(3, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ReLU(inplace=True), nn.Linear(3, 2)
    )


def conv1d() -> nn.Module:
    """(b, 2, 7) -> (b, 3)."""
    return nn.Sequential(nn.Conv1d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def conv2d() -> nn.Module:
    """(b, 2, 6, 5) -> (b, 3)."""
    return nn.Sequential(
        nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
        nn.ReLU(),
        nn.AvgPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def sparse_embedding() -> nn.Module:
    """Tokens (b, 3) -> (b, 2), with sparse gradients."""
    return nn.Sequential(nn.Embedding(5, 2, sparse=True), nn.Flatten(), nn.Linear(6, 2))


def odd_convolutions() -> nn.Module:
    """Groups, padding='same', circular padding and a transposed convolution: layers without a closed form of rows."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, groups=2, padding="same"),
        nn.Tanh(),
        nn.Conv2d(4, 2, 2, padding_mode="circular", padding=1),
        nn.ConvTranspose2d(2, 1, 2),
        nn.Flatten(),
        nn.Linear(36, 2),
    )


def batch_norm(train: bool) -> nn.Module:
    """Batch norm after a linear layer, its running statistics away from their start."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    norm.running_mean = torch.linspace(-1, 1, 4)
    return model.train(train)


def freeze_parts() -> nn.Module:
    """A frozen weight, a frozen bias and a whole frozen layer."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    model[4].requires_grad_(False)
    return model


X3 = draw(4, 3)
TOKENS = torch.tensor([[0, 1, 4], [2, 2, 3], [4, 0, 1]])

CASES: dict[str, Case] = {
    "mlp": Case(lambda: mlp(3, 4, 3), X3),
    "mlp, one example": Case(lambda: mlp(3, 4, 3), X3[:1]),
    "without bias": Case(lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)), X3),
    "bits": Case(lambda: mlp(3, 3, 2), X3, Bernoulli()),
    "gaussian": Case(lambda: mlp(3, 3, 2), X3, Gaussian(0.7)),
    "counts": Case(lambda: mlp(3, 3, 2), X3, Poisson()),
    "mean and log variance": Case(lambda: mlp(3, 3, 4), X3, HeteroscedasticGaussian()),
    "sequence": Case(Sequence, TOKENS),
    "sequence, tied": Case(lambda: Sequence(tied=True), TOKENS),
    "linear over positions": Case(lambda: mlp(3, 4, 2), draw(3, 2, 3, seed=1)),
    "attention": Case(Attention, draw(3, 4, 4, seed=2)),
    "tied": Case(Tied, X3),
    "twice used": Case(build_twice, X3),
    "behind a layer's back": Case(build_sneaky, X3),
    "bare parameter": Case(build_scale, X3),
    "frozen": Case(freeze_parts, X3),
    "not reached": Case(build_unreached, X3),
    "in-place rectifier": Case(in_place, X3),
    "conv1d": Case(conv1d, draw(3, 2, 7, seed=3)),
    "conv2d": Case(conv2d, draw(3, 2, 6, 5, seed=4)),
    "odd convolutions": Case(odd_convolutions, draw(3, 2, 4, 4, seed=5)),
    "group norm": Case(lambda: nn.Sequential(nn.Linear(3, 4), nn.GroupNorm(2, 4), nn.Linear(4, 2)), X3),
    "batch norm, training": Case(lambda: batch_norm(True), X3, mixes=True),
    "batch norm, evaluation": Case(lambda: batch_norm(False), X3),
    "sparse embedding": Case(sparse_embedding, TOKENS),
    "checkpointed": Case(build_checkpointed, X3),
    "plain function": Case(affine, X3),
    "dropout": Case(lambda: nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 2)), X3, mixes=True),
}


def reference_jacobian(model: Any, params: Mapping[str, Tensor], inputs: Any, rows: Callable[[Any], Tensor]) -> Tensor:
    """d rows / d params, (R, m, n), one plain backward pass per output, at the random state of now."""
    with torch.random.fork_rng(devices=[]):
        if isinstance(model, nn.Module):
            model = copy.deepcopy(model)  # batch norms in training mode write to their buffers
            params = trainable(model)
            outputs = rows(model(inputs))
        else:
            outputs = rows(model(params, inputs))
    found = []
    for entry in outputs.reshape(-1):
        gradients = torch.autograd.grad(
            entry, list(params.values()), retain_graph=True, materialize_grads=True, allow_unused=True
        )
        found.append(torch.cat([(g.to_dense() if g.is_sparse else g).reshape(-1) for g in gradients]))
    return torch.stack(found).view(*outputs.shape, -1)


def reference_outputs(model: Any, params: Mapping[str, Tensor], inputs: Any) -> Any:
    """The model's outputs, at the random state of now, with no trace left in the model."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        return copy.deepcopy(model)(inputs) if isinstance(model, nn.Module) else model(params, inputs)


def reference_metric(case: Case, model: Any, params: Mapping[str, Tensor]) -> Tensor:
    """E[J^T M J] written out, at the random state of now."""
    jacobian = reference_jacobian(model, params, case.inputs, case.family.rows)
    form = case.family.fisher(case.family.rows(reference_outputs(model, params, case.inputs)))
    return torch.einsum("ima,imn,inb->ab", jacobian, form, jacobian) / len(jacobian)


class CountedOperator(Operator):
    """Any symmetric matrix, which `operators.DenseOperator` is not there for, and a count of the products."""

    def __init__(self, matrix: Tensor) -> None:
        self.matrix, self.products = matrix, 0
        self.size, self.dtype, self.device = len(matrix), matrix.dtype, matrix.device

    def mv(self, vector: Tensor) -> Tensor:
        self.products += 1
        return self.matrix @ vector
