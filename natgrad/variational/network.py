"""A network's weights with data: their posterior under a normal prior."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from natgrad.families import Criterion, as_criterion
from natgrad.ground.pure import Labelled, PureModel, as_call, check_followed
from natgrad.ground.spaces import Params, Space, trainable
from natgrad.metrics import fisher
from natgrad.variational.quadrature import Points
from natgrad.variational.targets import LOG_2PI, Moments, SlopeTarget, apply_root


@dataclass(frozen=True)
class NetworkData:
    """What a network's posterior needs beside the network.

    Args:
        criterion: A torch.nn loss or an `ng` likelihood: what the outputs mean. Its weights are factors of the
            log-likelihood; ignored and missing targets say nothing.
        data_size: Number of examples in the whole set.
        prior_precision: Of the normal prior N(0, 1 / prior_precision) of each weight.
    """

    criterion: Any = None
    data_size: int | None = None
    prior_precision: float = 1.0


class NetworkOptions(TypedDict, total=False):
    """Keywords of `variational` for a network."""

    data: NetworkData
    criterion: Any
    data_size: int | None
    prior_precision: float


class Network(SlopeTarget):
    """data_size / b times the log-likelihood of b examples, plus log N(weights; 0, 1 / precision); Hessian -Fisher."""

    def __init__(self, model: nn.Module, criterion: Any, data_size: int, precision: float, points: Points) -> None:
        self.model, self.data_size, self.precision, self.points = model, data_size, precision, points
        self.criterion: Criterion = as_criterion(criterion)
        params = trainable(model)
        self.space = Space(params)
        self.metric = fisher(model, self.criterion)
        self.start = self.space.flatten({name: p.detach() for name, p in params.items()})
        self.parts = 1
        self.total: int | None = None

    def moments(self, mean: Tensor, root: Tensor, step: int, batch: tuple[Any, ...]) -> Moments:
        inputs, targets = self._read_batch(batch)
        z, weights = self.place_points(mean, step)
        moments = [self._one(place, root.dim() == 1, inputs, targets) for place in mean + apply_root(root, z)]
        value, gradient, hessian = (
            torch.einsum("s,s...->...", weights, torch.stack(part)) for part in zip(*moments, strict=True)
        )
        return Moments(value, gradient, hessian)

    def slopes(self, places: Tensor, batch: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        pairs = [self._differentiate(place, *self._read_batch(batch))[:2] for place in places]
        values, gradients = (torch.stack(part) for part in zip(*pairs, strict=True))
        return values, gradients

    def values_at(self, places: Tensor, batch: tuple[Any, ...]) -> Tensor:
        data = self._read_batch(batch)
        losses = [self._loss(self.space.unflatten(place), *data)[0] for place in places]
        return torch.stack([self._log_joint(loss, place) for loss, place in zip(losses, places, strict=True)])

    def take_part(self, parts: int, total: int | None = None) -> Network:
        part = copy.copy(self)
        part.parts, part.total = parts, total
        return part

    def predict(self, place: Tensor, inputs: Any) -> Any:
        """The network's outputs. place: Its weights z, (d,)."""
        return PureModel(self.model, as_call(inputs))(self.space.unflatten(place))

    def _read_batch(self, batch: tuple[Any, ...]) -> tuple[Any, Any]:
        """(inputs, targets) of a step. ValueError where the model has weights to train that q does not know."""
        if unknown := sorted(trainable(self.model).keys() - self.space.blocks.keys()):
            raise ValueError(
                f"q was made without {', '.join(unknown)}, which came or were unfrozen since: make q anew, or freeze "
                "them by requires_grad_(False)"
            )
        return require_batch(batch)

    def _one(self, place: Tensor, diagonal: bool, inputs: Any, targets: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Value, gradient and Hessian at the weights z (d,)."""
        own = torch.full_like(place, self.precision / self.parts)
        prior = own if diagonal else torch.diag(own)
        value, gradient, counted, share = self._differentiate(place, inputs, targets)
        if not share:
            return value, gradient, -prior
        metric = self.metric.at(self._leaves(place), inputs if counted is None else Labelled(inputs, counted))
        curvature = (metric.diagonal() if diagonal else metric.dense()) * share
        return value, gradient, -(curvature + prior)

    def _differentiate(self, place: Tensor, inputs: Any, targets: Any) -> tuple[Tensor, Tensor, Any, float]:
        """log p and its gradient at the weights z (d,); targets and count of `_loss`."""
        params, gradient = self._leaves(place), self.precision / self.parts * place
        with torch.enable_grad():
            loss, counted, share = self._loss(params, inputs, targets)
        if share:
            check_followed(loss, params, self.model)
            slopes = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
            gradient = self.space.flatten(dict(zip(params, slopes, strict=True))) + gradient
        return self._log_joint(loss.detach(), place), -gradient, counted, share

    def _leaves(self, place: Tensor) -> dict[str, Tensor]:
        return {name: part.clone().requires_grad_() for name, part in self.space.unflatten(place).items()}

    def _loss(self, params: Params, inputs: Any, targets: Any) -> tuple[Tensor, Any, float]:
        """-log p(data | weights), scaled to the whole set from a batch; the rest as `Criterion.add_up`, scaled too."""
        call = as_call(inputs)
        size = call.batch() if self.total is None else self.total
        if self.total is not None and call.batch() == 0:  # the examples are all on other processes
            return next(iter(params.values())).new_zeros(()), None, 0.0
        loss, counted, count = self.criterion.add_up(PureModel(self.model, call)(params), targets)
        return loss * (self.data_size / size), counted, count * self.data_size / size

    def _log_joint(self, loss: Tensor, place: Tensor) -> Tensor:
        prior = 0.5 * (len(place) * (math.log(self.precision) - LOG_2PI) - self.precision * place.square().sum())
        return prior / self.parts - loss


def require_batch(batch: tuple[Any, ...]) -> tuple[Any, Any]:
    """(inputs, targets) of a step."""
    if len(batch) != 2:
        raise TypeError(f"step got {len(batch)} arguments, expected inputs and targets: q.step(x, y)")
    return batch[0], batch[1]
