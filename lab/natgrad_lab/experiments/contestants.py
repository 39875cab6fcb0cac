"""The optimisers that the laboratory races, built by name from one point of a grid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad_lab.experiments.base import Choice, Contestant, LabError
from natgrad_lab.experiments.soap import SOAP


def natural_gradient(grid: Iterable[Choice]) -> Contestant:
    """Truncated Newton on the exact Fisher: `ng.hessian_free`."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        solver = ng.CG(rtol=1e-6, max_steps=int(choice["products"]), progress=5e-4)
        damping = ng.LevenbergMarquardt(start=choice["damping"], floor=choice["damping"] / 1000, per="loss")
        return ng.hessian_free(model, criterion, solver=solver, damping=damping, metric_batch=int(choice["metric"]))

    return Contestant("natural gradient", tuple(grid), build)


def krylov_subspace(grid: Iterable[Choice]) -> Contestant:
    """Krylov subspace descent: `ng.krylov_subspace`."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return ng.krylov_subspace(
            model,
            criterion,
            dimension=int(choice["dimension"]),
            metric_batch=int(choice["metric"]),
            search_batch=int(choice["search"]),
        )

    return Contestant("Krylov subspace", tuple(grid), build)


def apply_recipe(name: str, recipe: Callable[..., torch.optim.Optimizer], grid: Iterable[Choice]) -> Contestant:
    """A recipe with one block per layer: `ng.kfac` and its family."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return recipe(model, criterion, **{key: value for key, value in choice.items() if key != "batch"})

    return Contestant(name, tuple(grid), build)


def kfac(grid: Iterable[Choice]) -> Contestant:
    """K-FAC as a drop-in: `ng.kfac`."""
    return apply_recipe("K-FAC", ng.kfac, grid)


FAMILY = {
    "kfac": ("K-FAC", ng.kfac),
    "ekfac": ("EKFAC", ng.ekfac),
    "unitwise": ("unit-wise", ng.unitwise),
    "diagonal": ("diagonal", ng.diagonal),
    "online_ng": ("Kaldi-style", ng.online_ng),
    "tonga": ("TONGA", ng.tonga),
}
GROUPS = {"structures": (*FAMILY, "adam", "muon", "soap", "sgd")}


def by_default(batch: int) -> dict[str, Contestant]:
    """The recipes with one block per layer, as they come."""
    return {key: apply_recipe(name, recipe, grid(batch=(batch,))) for key, (name, recipe) in FAMILY.items()}


def adam(grid: Iterable[Choice], betas: tuple[float, float] = (0.9, 0.999)) -> Contestant:
    """torch.optim.Adam."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=choice["lr"], betas=betas)

    return Contestant("Adam", tuple(grid), build)


def sgd(grid: Iterable[Choice], momentum: float = 0.9) -> Contestant:
    """torch.optim.SGD with heavy-ball momentum."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=choice["lr"], momentum=momentum)

    return Contestant("SGD-momentum", tuple(grid), build)


def soap(grid: Iterable[Choice]) -> Contestant:
    """SOAP, Adam in the eigenbasis of Shampoo's factors, with its authors' defaults but no weight decay."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return SOAP(model.parameters(), choice["lr"])

    return Contestant("SOAP", tuple(grid), build)


def muon(grid: Iterable[Choice], but: Collection[str] = ()) -> Contestant:
    """Muon on the weight matrices (float32), Adam on the rest.

    Filters of convolutions count as matrices, a row per filter.
    """

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if p.dim() >= 2 and name not in but}
        rest = [p for name, p in named.items() if name not in matrices]
        return JoinedOptimizers(Muon(matrices.values(), choice["lr"]), torch.optim.Adam(rest, lr=choice["adam_lr"]))

    return Contestant("Muon and Adam", tuple(grid), build)


class Muon(torch.optim.Optimizer):
    """W <- W - lr max(1, rows / columns)^1/2 O, O the polar factor of the momentum.

    torch.optim.Muon without weight decay, in the dtype of W: its bfloat16 products took 3 s per step on a CPU for 2.8
    million weights, these .2 s.

    K. Jordan et al. 2024.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step with Nesterov's momentum."""
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                matrix = p.grad.lerp(momentum, group["momentum"]).flatten(1)
                scale = max(1.0, matrix.shape[0] / matrix.shape[1]) ** 0.5
                p.add_(orthogonal(matrix).view_as(p), alpha=-group["lr"] * scale)


def orthogonal(matrix: Tensor, steps: int = 5) -> Tensor:
    """Roughly U V^T of matrix = U S V^T: Newton-Schulz with Muon's quintic, singular values end in about .7 to 1.2."""
    x = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class JoinedOptimizers(torch.optim.Optimizer):
    """Several optimisers, each with parameters of its own, that step as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for group in part.param_groups for p in group["params"]], {})
        self.param_groups = [group for part in parts for group in part.param_groups]  # theirs: schedules reach them

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """A step of each."""
        for part in self.parts:
            part.step()

    def state_dict(self) -> dict[str, Any]:
        """Those of the parts."""
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def grid(**axes: Iterable[float]) -> list[Choice]:
    """All combinations: grid(batch=(64, 256), lr=(.1,)) -> [{batch: 64, lr: .1}, {batch: 256, lr: .1}]."""
    choices: list[dict[str, float]] = [{}]
    for name, values in axes.items():
        choices = [{**choice, name: value} for choice in choices for value in values]
    return list(choices)


def select(words: str, among: Mapping[str, Contestant], groups: Mapping[str, Sequence[str]]) -> tuple[Contestant, ...]:
    """Contestants by words joined by commas, each once."""
    wanted: set[str] = set()
    for word in words.split(","):
        if word in groups:
            wanted |= {key for key in groups[word] if key in among and missing(among[key]) is None}
        elif word not in among:
            raise LabError(f"methods has the word {word!r}, expected words among {', '.join([*groups, *among])}")
        elif package := missing(among[word]):
            raise LabError(f"{word} needs the package {package}: pip install {package}, or race without it")
        else:
            wanted.add(word)
    return tuple(contestant for key, contestant in among.items() if key in wanted)


def missing(contestant: Contestant) -> str | None:
    """The package that a contestant needs and that is not installed; None if there is none."""
    return contestant.needs if contestant.needs and find_spec(contestant.needs) is None else None
