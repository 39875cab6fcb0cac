"""Examples' squared gradients of parameters that a model adds or multiplies, by one backward pass."""

from collections.abc import Callable

import pytest
import torch
from engine_state import kept_of
from models import Assembled
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.layers import square_elementwise
from natgrad.layers.examples import Examples, consecutive

B, T, D = 5, 4, 3
X = torch.randn(B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

USES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "positions": ((T, D), lambda x, p: x + p),
    "scale": ((D,), lambda x, p: x * p),
    "scale first": ((1, T, 1), lambda x, p: p * x),
    "class token": ((1, 1, D), lambda x, p: torch.cat([p.expand(len(x), -1, -1), x], 1)),
    "temperature": ((), lambda x, p: x * p),
    "the first positions": ((T + 2, D), lambda x, p: x + p[:T]),
    "the first positions, with an axis": ((1, T + 2, D), lambda x, p: x + p[:, :T]),
    "one row of a table": ((3, D), lambda x, p: x * p[1]),
    "positions in columns": ((D, T), lambda x, p: x + p.T.unsqueeze(0)),
    "a class token out of a table": ((3, D), lambda x, p: torch.cat([p[:1].expand(len(x), 1, D), x], 1)),
    "twice": ((D,), lambda x, p: (x + p).tanh() * p),
}
OTHERS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "a power": ((D,), lambda x, p: x * p.exp()),
    "a sum and a power": ((D,), lambda x, p: x * p.exp() + p),
    "two parts that overlap": ((T + 1, D), lambda x, p: (x + p[:T]) * p[1:]),
    "rows that are looked up": ((T, D), lambda x, p: x + p[torch.arange(T)]),
    "positions first": ((B, 1, D), lambda x, p: x + p),
    "multiplied when it is added": ((D,), lambda x, p: torch.add(x, p, alpha=2.0)),
    "examples meet": ((D,), lambda x, p: (x + p).cumsum(0)),
    "examples in another order": ((D,), lambda x, p: (x * p).flip(0)),
}


def read(use: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> tuple[Tensor | None, Tensor]:
    """What one pass finds, and the sum of squared gradients example by example."""
    generator = torch.Generator().manual_seed(1)
    p = (0.5 + torch.rand(shape, generator=generator, dtype=torch.float64)).requires_grad_()
    outputs = use(X, p).tanh().flatten(1).sin()
    examples: Examples = consecutive(B, outputs)
    cotangents = [torch.randn(outputs.shape, generator=generator, dtype=torch.float64) for _ in range(2)]
    plain = [torch.autograd.grad(outputs, [p], c, retain_graph=True) for c in cotangents]
    (found,) = square_elementwise(outputs, [p], cotangents, examples, plain)
    rows = torch.arange(B, dtype=torch.float64)
    parts = [c * (rows == i).unsqueeze(1) for c in cotangents for i in range(B)]
    squares = [torch.autograd.grad(outputs, p, part, retain_graph=True)[0].square() for part in parts]
    return found, torch.stack(squares).sum(0)


@pytest.mark.parametrize("name", [*USES, *OTHERS])
def test_sums_and_products_give_every_examples_gradient_and_of_other_uses_nothing_is_said(name: str):
    shape, use = (USES | OTHERS)[name]
    found, expected = read(use, shape)
    assert (found is None) == (name in OTHERS)
    if found is not None:
        assert_close(found, expected)


def test_an_optimizer_takes_the_exact_squares():

    torch.manual_seed(0)
    x, y = torch.randn(40, T, D), torch.randint(2, (40,))  # more examples than groups of them
    net = Assembled(
        lambda m, x: m.head((x + m.place).tanh().mean(1)), place=nn.Parameter(torch.zeros(T, D)), head=nn.Linear(D, 2)
    )
    opt = ng.kfac(net, nn.CrossEntropyLoss(), estimate=ng.ExactLabels())
    logits = net(x)
    opt.loss(logits, y)
    p, squares = logits.softmax(1), 0.0
    for i in range(40):
        for label in range(2):
            (g,) = torch.autograd.grad(-logits[i].log_softmax(0)[label], net.place, retain_graph=True)
            squares = squares + p[i, label].detach() * g.square() / 40
    state = kept_of(opt, net.place)
    assert_close(state["totals"]["squares"] / state["weight"], squares)
