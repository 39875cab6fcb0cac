"""Logits of -inf: a masked class is as good as none, in the families, as a likelihood, and in every optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import natgrad as ng
from natgrad.families import Categorical, Multinomial

F64 = torch.float64
FREE = [0, 2, 3]
LOGITS = torch.tensor([[0.3, -torch.inf, -1.0, 0.5], [9.0, -torch.inf, -80.0, 2.0]], dtype=F64)
OTHER = torch.tensor([[-0.2, -torch.inf, 0.4, 0.1], [8.0, -torch.inf, -79.0, 3.0]], dtype=F64)


def keep_free(theta: Tensor) -> Tensor:
    return theta[..., FREE]


def finite_gradient(function, theta: Tensor) -> Tensor:
    point = theta.clone().requires_grad_()
    (found,) = torch.autograd.grad(function(point).sum(), point)
    assert bool(torch.isfinite(found).all())
    assert float(found[..., 1].abs().max()) == 0
    return keep_free(found)


@pytest.mark.parametrize("whole", [Categorical(4), Categorical(), Multinomial(6, 4)], ids=repr)
def test_a_masked_family_is_that_of_the_other_classes(whole):
    part = Multinomial(6, 3) if isinstance(whole, Multinomial) else Categorical(3)
    for of in (
        lambda f, t: f.entropy(t),
        lambda f, t: f.log_partition(t),
        lambda f, t: f.kl(t, OTHER if t.shape[-1] == 4 else keep_free(OTHER)),
    ):
        assert_close(of(whole, LOGITS), of(part, keep_free(LOGITS)))
        expected = torch.func.grad(lambda t, of=of: of(part, t).sum())(keep_free(LOGITS))
        assert_close(finite_gradient(lambda t, of=of: of(whole, t), LOGITS), expected)
    assert_close(keep_free(whole.expectation(LOGITS)), part.expectation(keep_free(LOGITS)))
    assert_close(keep_free(keep_free(whole.covariance(LOGITS)).mT).mT, part.covariance(keep_free(LOGITS)))
    assert float(whole.covariance(LOGITS)[:, 1].abs().max()) == 0
    for theta in LOGITS:
        operator, small = whole.fisher(theta), part.fisher(keep_free(theta))
        assert_close(keep_free(keep_free(operator.dense()).mT).mT, small.dense())
        inverse, expected = operator.inverse(0.0), small.inverse(0.0)
        assert inverse is not None
        assert expected is not None
        assert_close(keep_free(keep_free(inverse.dense()).mT).mT, expected.dense())
        assert float(inverse.dense()[1].abs().max()) == 0


def test_masked_classes_are_never_drawn_and_have_no_probability():
    family = Categorical(4)
    x = family.sample(LOGITS, 500)
    assert not bool((x == 1).any())
    assert_close(
        family.log_prob(LOGITS, x), LOGITS.log_softmax(-1).expand(500, 2, 4).gather(-1, x.unsqueeze(-1))[..., 0]
    )
    assert bool(torch.isneginf(family.log_prob(LOGITS, torch.tensor(1))).all())
    shares = torch.tensor([0.5, 0.0, 0.25, 0.25], dtype=F64)
    finite_gradient(lambda t: family.log_prob(t, shares), LOGITS)
    counts = Multinomial(6, 4).sample(LOGITS, 50)
    assert float(counts[..., 1].max()) == 0
    assert_close(
        Multinomial(6, 4).log_prob(LOGITS, counts), Multinomial(6, 3).log_prob(keep_free(LOGITS), keep_free(counts))
    )


def test_kl_to_a_mask_that_rules_out_what_comes_is_infinite():
    family = Categorical(3)
    free = torch.zeros(3, dtype=F64)
    masked = torch.tensor([0.0, 0.0, -torch.inf], dtype=F64)
    assert float(family.kl(free, masked)) == torch.inf
    assert_close(family.kl(masked, free), torch.tensor(1.5, dtype=F64).log())


@pytest.mark.parametrize("logits", [[torch.inf, 0.0], [torch.nan, 0.0], [-torch.inf, -torch.inf]])
def test_other_numbers_that_are_not_finite_are_refused(logits):
    for family in (Categorical(2), Multinomial(3, 2)):
        for ask in (family.entropy, family.expectation, lambda t, f=family: f.sample(t, 2)):
            with pytest.raises(ValueError, match="-inf for classes that cannot come"):
                ask(torch.tensor(logits))


class Masked(nn.Module):
    """A net whose logits of class 1 are masked, as an action or a vocabulary is."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        ruled_out = torch.tensor([False, True, False, False])
        return self.head(self.body(x).tanh()).masked_fill(ruled_out, -torch.inf)


OPTIMIZERS = {
    "kfac": lambda model: ng.kfac(model, nn.CrossEntropyLoss(), lr=0.1),
    "unitwise": lambda model: ng.unitwise(model, nn.CrossEntropyLoss(), lr=0.1),
    "diagonal": lambda model: ng.diagonal(model, nn.CrossEntropyLoss(), lr=0.1),
    "online_ng": lambda model: ng.online_ng(model, nn.CrossEntropyLoss(), lr=0.1),
    "hessian_free": lambda model: ng.hessian_free(model, nn.CrossEntropyLoss(), lr=1.0),
    "exact": lambda model: ng.NaturalGradient(model, ng.fisher(model, Categorical()), lr=0.3, damping=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_train_through_a_mask(name):
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(32, 5)
    y = torch.tensor(FREE)[torch.randint(0, 3, (32,))]
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = OPTIMIZERS[name](model)
    losses = []
    for _ in range(6):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = (
                optimizer.loss(model(x), y) if hasattr(optimizer, "loss") else nn.functional.cross_entropy(model(x), y)
            )
            if isinstance(loss, Tensor) and loss.requires_grad:
                loss.backward()
            losses.append(loss.item())
            return loss

        optimizer.step(closure)
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
    assert losses[-1] < losses[0]
    assert_close(model.head.weight[1], before[2][1])  # the masked class has no gradient
