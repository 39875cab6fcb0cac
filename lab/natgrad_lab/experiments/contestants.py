"""The optimisers that the laboratory races, built by name from one point of a grid."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.ground.linalg import eigh
from natgrad_lab.experiments.base import Choice, Contestant
from natgrad_lab.experiments.settings import split_words


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
        dimension, metric, search = (int(choice[key]) for key in ("dimension", "metric", "search"))
        return ng.krylov_subspace(model, criterion, dimension=dimension, metric_batch=metric, search_batch=search)

    return Contestant("Krylov subspace", tuple(grid), build)


def apply_recipe(name: str, recipe: Callable[..., torch.optim.Optimizer], grid: Iterable[Choice]) -> Contestant:
    """A recipe with one block per layer: `ng.kfac` and its family."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        return recipe(model, criterion, **{key: value for key, value in choice.items() if key != "batch"})

    return Contestant(name, tuple(grid), build)


FAMILY = {
    "kfac": ("K-FAC", ng.kfac),
    "ekfac": ("EKFAC", ng.ekfac),
    "unitwise": ("unit-wise", ng.unitwise),
    "diagonal": ("diagonal", ng.diagonal),
    "online_ng": ("Kaldi-style", ng.online_ng),
    "tonga": ("TONGA", ng.tonga),
}
GROUPS = {"structures": (*FAMILY, "adam", "muon", "soap", "sgd")}


def adam(grid: Iterable[Choice], betas: tuple[float, float] = (0.9, 0.999)) -> Contestant:
    """torch.optim.Adam."""
    return Contestant("Adam", tuple(grid), lambda m, _, choice: torch.optim.Adam(m.parameters(), choice["lr"], betas))


def sgd(grid: Iterable[Choice], momentum: float = 0.9) -> Contestant:
    """torch.optim.SGD with heavy-ball momentum."""
    return Contestant(
        "SGD-momentum", tuple(grid), lambda m, _, choice: torch.optim.SGD(m.parameters(), choice["lr"], momentum)
    )


def soap(grid: Iterable[Choice]) -> Contestant:
    """SOAP, Adam in the eigenbasis of Shampoo's factors, with its authors' defaults but no weight decay."""
    return Contestant("SOAP", tuple(grid), lambda m, _, choice: SOAP(m.parameters(), choice["lr"]))


def muon(grid: Iterable[Choice], but: Collection[str] = ()) -> Contestant:
    """Muon on the weight matrices (float32), filters of convolutions as rows of one; Adam on the rest."""

    def build(model: nn.Module, criterion: nn.Module, choice: Choice) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        matrices = {name: p for name, p in named.items() if p.dim() >= 2 and name not in but}
        rest = [p for name, p in named.items() if name not in matrices]
        return JoinedOptimizers(Muon(matrices.values(), choice["lr"]), torch.optim.Adam(rest, lr=choice["adam_lr"]))

    return Contestant("Muon and Adam", tuple(grid), build)


def line_up(batch: int, but: Collection[str] = (), **axes: Mapping[str, Iterable[float]]) -> dict[str, Contestant]:
    """The recipes as they come, and others over grids, narrowed by probes. but: matrices of Adam's, not Muon's."""
    recipes = {key: apply_recipe(name, recipe, grid(batch=(batch,))) for key, (name, recipe) in FAMILY.items()}
    tuned = {**TUNED, "muon": lambda choices: muon(choices, but)}
    return recipes | {name: tuned[name](grid(**{"batch": (batch,), **of})) for name, of in axes.items()}


TUNED: dict[str, Callable[[Iterable[Choice]], Contestant]] = {
    "hessian_free": natural_gradient,
    "krylov_subspace": krylov_subspace,
    "adam": adam,
    "soap": soap,
    "sgd": sgd,
}


class Muon(torch.optim.Optimizer):
    """W <- W - lr max(1, rows / columns)^1/2 O, O the polar factor of the momentum. K. Jordan et al. 2024.

    In the dtype of W: torch.optim.Muon's bfloat16 takes 3 s a step on a CPU for 2.8 million weights, this .2 s.
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


class SOAP(torch.optim.Optimizer):
    """W <- W - lr Q_L A(Q_L^T M Q_R) Q_R^T with A the division by the root of the second moments in that basis.

    Q_L, Q_R: eigenvectors of the running means of G G^T and G^T G for a gradient G, made at the first step and then
    followed by one power iteration and a QR decomposition every so many steps. Filters of convolutions count as
    matrices, a row per filter. A side longer than `longest` keeps the identity, a vector is Adam's.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        betas: tuple[float, float] = (0.95, 0.95),
        eps: float = 1e-8,
        every: int = 10,
        longest: int = 10_000,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "every": every, "longest": longest})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    matrix = p.grad.flatten(1) if p.dim() > 1 else p.grad.reshape(1, -1)
                    p.add_(direction(matrix, self.state[p], group, p.dim() > 1).view_as(p), alpha=-group["lr"])


def direction(gradient: Tensor, state: dict[str, Any], group: dict[str, Any], rotated: bool) -> Tensor:
    """What is subtracted from a matrix, per unit of the rate. state: of the parameter, brought up to date."""
    if not state:
        state |= {"step": 0, "mean": torch.zeros_like(gradient), "square": torch.zeros_like(gradient)}
    state["step"] += 1
    if rotated:
        turn(gradient, state, group)
    first, second = group["betas"]
    state["mean"].lerp_(gradient, 1 - first)
    state["square"].lerp_(rotate(gradient, state).square(), 1 - second)
    mean = rotate(state["mean"], state) / (1 - first ** state["step"])
    root = (state["square"] / (1 - second ** state["step"])).sqrt()
    return rotate(mean / (root + group["eps"]), state, back=True)


def turn(gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    """Update the factors, and the basis where that is due."""
    decay = group["betas"][1]
    for side, product in (("left", lambda: gradient @ gradient.mT), ("right", lambda: gradient.mT @ gradient)):
        if gradient.shape[0 if side == "left" else 1] > group["longest"]:
            continue
        if f"{side} basis" not in state:
            state[side] = (1 - decay) * product()
            state[f"{side} basis"] = eigh(state[side])[1].flip(1)
            continue
        state[side].lerp_(product(), 1 - decay)
        if state["step"] % group["every"] == 0:
            # one orthogonal iteration, eigenvectors sorted by what they explain, and the second moments with them
            factor, basis = state[side], state[f"{side} basis"]
            order = (basis * (factor @ basis)).sum(0).argsort(descending=True)
            state["square"] = state["square"].index_select(0 if side == "left" else 1, order)
            state[f"{side} basis"] = torch.linalg.qr(factor @ basis[:, order])[0]


def rotate(matrix: Tensor, state: dict[str, Any], back: bool = False) -> Tensor:
    """Q_L^T X Q_R; back: Q_L X Q_R^T."""
    left, right = state.get("left basis"), state.get("right basis")
    matrix = matrix if left is None else (left if back else left.mT) @ matrix
    return matrix if right is None else matrix @ (right.mT if back else right)


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


def select(
    words: str, among: Mapping[str, Contestant], groups: Mapping[str, Sequence[str]] = GROUPS
) -> tuple[Contestant, ...]:
    """Contestants by words joined by commas, each once."""
    wanted = [key for word in split_words("methods", words, [*groups, *among]) for key in groups.get(word, (word,))]
    return tuple(contestant for key, contestant in among.items() if key in wanted)
