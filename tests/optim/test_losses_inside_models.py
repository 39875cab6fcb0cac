"""A model that computes its loss itself, as (logits, loss) or as a record: that loss is the one that is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from models import pair
from torch import Tensor, nn
from torch.nn import functional

import natgrad as ng
from natgrad.families import TokenCrossEntropy

WORDS, PLACES, WIDTH = 7, 5, 8


@dataclass
class Record:
    """As transformers' models return one."""

    logits: Tensor
    loss: Tensor | None = None


class TinyGPT(nn.Module):
    """A language model as nanoGPT has it: tied weights, and a loss of its own where there are targets."""

    def __init__(self, pack: Callable[[Tensor, Tensor | None], Any], smoothing: float = 0.0) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.project, self.lm_head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WORDS, bias=False)
        self.wte.weight = self.lm_head.weight
        self.pack, self.smoothing, self.calls = pack, smoothing, 0

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        scores = (query @ key.transpose(1, 2) / WIDTH**0.5).masked_fill(self.mask(tokens), -torch.inf)
        logits = self.lm_head(x + self.project(scores.softmax(-1) @ value))
        return self.pack(logits, None if targets is None else self.evaluate_loss(logits, targets))

    def mask(self, tokens: Tensor) -> Tensor:
        return torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool()

    def evaluate_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        flat = logits.reshape(-1, WORDS), targets.reshape(-1)
        return functional.cross_entropy(*flat, ignore_index=-1, label_smoothing=self.smoothing)


PACKS: dict[str, Callable[[Tensor, Tensor | None], Any]] = {
    "(logits, loss)": lambda logits, loss: (logits, loss),
    "(loss, logits, more)": lambda logits, loss: (loss, logits, None),
    "a record": Record,
    "the logits": lambda logits, loss: logits,
}
LOSS = "token_cross_entropy(ignore_index=-1)"


def build_model(pack: str = "(logits, loss)", **options: Any) -> tuple[TinyGPT, Tensor, Tensor]:
    torch.manual_seed(0)
    model = TinyGPT(PACKS[pack], **options).double()
    tokens = torch.arange(16)[:, None] + torch.arange(PLACES + 1)
    x, y = (tokens % WORDS)[:, :-1], (tokens % WORDS)[:, 1:].clone()
    y[0, :2] = -1
    return model, x, y


def train_inside(opt: Any, model: nn.Module, x: Tensor, y: Tensor, own: bool, steps: int = 5) -> list[float]:
    """own: the model is given the targets, and what it returns is one of the parts of its loss."""
    losses = list[float]()
    for _ in range(steps):
        opt.zero_grad()
        out = model(x, y if own else None)
        loss = opt.loss(out, y)
        assert not own or any(loss is part for part in (out if isinstance(out, tuple) else vars(out).values()))
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("pack", "recipe"), pair([pack for pack in PACKS if pack != "the logits"], [ng.kfac, ng.hessian_free])
)
def test_the_model_s_own_loss_takes_the_steps_of_its_criterion(pack: str, recipe: Any):
    runs = list[list[float]]()
    for own in (True, False):
        model, x, y = build_model(pack if own else "the logits")
        runs.append(train_inside(recipe(model, LOSS), model, x, y, own))
    assert runs[0][-1] < 0.9 * runs[0][0]
    torch.testing.assert_close(*(torch.tensor(run, dtype=torch.float64) for run in runs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("pack", [lambda logits, loss: (logits, None), lambda logits, loss: [None, logits, None]])
def test_a_pair_without_a_loss_is_its_logits(pack: Callable[..., Any], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(PACKS, "a pair", pack)
    runs = list[list[float]]()
    for name in ("a pair", "the logits"):
        model, x, y = build_model(name)
        runs.append(train_inside(ng.kfac(model, LOSS), model, x, y, own=False, steps=3))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("smoothing", [0.1, 0.5])
def test_another_loss_than_the_criterion_is_refused(smoothing: float):
    model, x, y = build_model(smoothing=smoothing)
    opt = ng.kfac(model, LOSS)
    with pytest.raises(ValueError, match=r"the model returned the loss .* model.loss_function .* leave the targets"):
        opt.loss(model(x, y), y)
    opt.loss(model(x, y)[0], y).backward()  # the criterion's alone
    opt.step()


def test_an_own_choice_of_outputs_leaves_the_model_s_loss_alone():
    model, x, y = build_model(smoothing=0.1)
    opt = ng.kfac(model, LOSS, outputs=lambda out: out[0])
    logits, own = model(x, y)
    loss = opt.loss((logits, own), y)
    assert float(loss.detach()) == pytest.approx(float(TokenCrossEntropy(ignore_index=-1)(logits, y).detach()))


def test_torch_s_axes_are_told_from_those_of_language_models():
    model, x, y = build_model()
    with pytest.raises(ValueError, match='classes are the last axis: take "token_cross_entropy"'):
        ng.kfac(model, "cross_entropy").loss(model(x)[0], y.clamp(min=0))
