"""What a model's outputs mean: a distribution over targets, and its Fisher form on the outputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from natgrad.ground.linalg import psd_root
from natgrad.ground.messages import Explained
from natgrad.ground.pure import leaves, map_tensors
from natgrad.ground.typed_torch import read_scalars


class Likelihood(Explained):
    """p(target | outputs). Users write their own with `nll` and `sample`, and `fisher` for the exact metric.

    A model's outputs are laid out as rows (R, m) by `rows`: one row per independent event, m parameters each. The
    built-in likelihoods take natural parameters (logits, log rates), so that their Fisher form never divides by a
    probability (Pascanu & Bengio eq. 10, 11 in the logits; the printed form is NaN once y underflows).

    Example:
        >>> class Laplace(ng.Likelihood):
        ...     def nll(self, outputs, targets):
        ...         return (outputs - targets).abs().flatten(1).sum(1)
        ...     def sample(self, outputs, generator=None):
        ...         u = torch.rand(outputs.shape, generator=generator) - 0.5
        ...         return outputs - u.sign() * torch.log1p(-2 * u.abs())
        >>> model, x = nn.Linear(2, 1), torch.randn(5, 2)
        >>> ng.sampled_fisher(model, Laplace()).at(ng.trainable(model), x).dense().shape
        torch.Size([3, 3])
    """

    call_hint = "; a likelihood holds no parameters, they are a model's outputs"
    note: ClassVar[str] = ""
    """What `optimizer.report()` says of the metric beside its rows."""

    masks: bool = False
    """Whether targets may be missing."""

    needs_targets: ClassVar[bool] = True
    """Whether its loss is of targets; where it is not, the targets are None."""

    @abstractmethod
    def nll(self, outputs: Any, targets: Any) -> Tensor:
        """-log p(targets | outputs) in nats, one number per row (R,), constants included.

        Args:
            outputs: What the model returns.
            targets: As the likelihood takes them.
        """

    @abstractmethod
    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Any:
        """Targets drawn from p(. | outputs), in the layout that `nll` takes.

        Args:
            outputs: What the model returns.
            generator: Source of the draws. None: the global one.
        """

    def rows(self, outputs: Any) -> Tensor:
        """Outputs laid out as (R, m). Default: (b, ...) -> (b, m); a tuple's or dict's tensors side by side.

        Args:
            outputs: What the model returns.
        """
        parts = [flatten_rows(part) for part in leaves(outputs)]
        if not parts:
            raise ValueError(f"the model returned {type(outputs).__name__} without a tensor, expected outputs (b, ...)")
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def write_out(self, outputs: Any) -> Any:
        """Outputs in which no number is of several rows, so that each row has a gradient of its own, in their layout.

        Default: as they are.

        Args:
            outputs: What the model returns.
        """
        return outputs

    def fisher(self, rows: Tensor) -> Tensor:
        """E[s s^T] of the score s = d log p / d row, for every row, shape (R, m, m).

        Args:
            rows: Outputs laid out as rows, shape (R, m).
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no fisher(rows) -> (R, m, m), which the exact metric needs; write it, or use "
            "ng.sampled_fisher(model, likelihood, samples=k), which only needs sample()"
        )

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        """Fisher form times tangents, row by row, shape (R, m).

        Args:
            outputs: Outputs laid out as rows, shape (R, m).
            tangents: Shape (R, m).
        """
        return torch.einsum("imn,in->im", self.fisher(outputs), tangents)

    def root(self, outputs: Tensor) -> Tensor:
        """F with E[s s^T] = F F^T for every row, shape (R, m, q).

        Args:
            outputs: Outputs laid out as rows, shape (R, m).
        """
        return psd_root(self.fisher(outputs))

    def score(self, outputs: Any, targets: Any) -> Tensor:
        """d log p(targets | outputs) / d row, shape (R, m).

        Args:
            outputs: What the model returns.
            targets: As `nll` takes them.
        """
        slopes = differentiate_outputs(lambda at: -self.nll(at, targets).sum(), self.write_out(outputs))
        return self.rows(slopes).detach()

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        """KL(p(. | outputs), p(. | other)) for every row, in nats, shape (R,).

        Args:
            outputs: Outputs laid out as rows, shape (R, m).
            other: Other outputs, shape (R, m).
        """
        raise NotImplementedError(f"{type(self).__name__} has no kl(outputs, other); write it to measure divergences")

    def check_targets(self, outputs: Any, targets: Any) -> None:
        """Check that targets can have come from this likelihood. Default: accepts anything.

        Args:
            outputs: What the model returns.
            targets: As `nll` takes them.

        Raises:
            ValueError: If they cannot.
        """

    def fill(self, outputs: Any, targets: Any) -> tuple[Any, Tensor | None]:
        """Targets without gaps, and which of them came. Default: all of them.

        Args:
            outputs: What the model returns.
            targets: As `nll` takes them.

        Returns:
            The targets, any number in the gaps, and a mask (R, 1) of rows or (R, m) of their entries. None: no gap.
        """
        return targets, None

    def weigh(
        self, outputs: Any, targets: Any, weight: Any, add: Callable[[Tensor], Tensor] | None
    ) -> tuple[Any, Tensor]:
        """Targets without gaps, and what each counts in the mean over rows: w / mean(w), and 0 for a missing one.

        Args:
            outputs: What the model returns.
            targets: As `nll` takes them.
            weight: w of the examples (b,) or of the rows (R,). None: equal weights.
            add: Sums over processes. None: there is one.

        Returns:
            The targets, and shape (R, 1), or (R, m) where the entries of a row differ. NaN where no target counts.
        """
        (filled, came), rows = self.fill(outputs, targets), self.rows(outputs).detach()
        shares = rows.new_ones(len(rows), 1, dtype=torch.promote_types(rows.dtype, torch.float32))
        shares = shares if came is None else shares * came
        if weight is not None:
            shares = shares * read_weight(weight, len(next(leaves(outputs))), shares)
        sums = torch.stack([shares.double().mean(1).sum(), shares.new_tensor(len(rows)).double()])
        total, count = sums if add is None else add(sums)
        return filled, shares * (count / total).to(shares.dtype)

    def weighted_nll(self, outputs: Any, targets: Any, weights: Tensor) -> Tensor:
        """`nll` with what `weigh` gave, one number per row (R,).

        Args:
            outputs: What the model returns.
            targets: Without gaps.
            weights: Shape (R, 1), or (R, m), equal within a row unless its entries are independent.
        """
        return self.nll(outputs, targets) * weights[:, 0]


class DiagonalForm(Likelihood):
    """A likelihood whose Fisher form is diagonal in its outputs."""

    @abstractmethod
    def curvature(self, outputs: Tensor) -> Tensor:
        """The form's diagonal: Fisher information of every output, shape (R, m).

        Args:
            outputs: Outputs laid out as rows, shape (R, m).
        """

    def fisher(self, rows: Tensor) -> Tensor:
        return torch.diag_embed(self.curvature(rows))

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return self.curvature(outputs) * tangents

    def root(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed(self.curvature(outputs).sqrt())


class SeparableLikelihood(DiagonalForm):
    """Outputs that are independent given the input, each with one natural parameter: the form is diagonal."""

    @abstractmethod
    def entry_nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """-log p of every entry in nats, in their shape.

        Args:
            outputs: Shape (b, ...).
            targets: The same shape.
        """

    def rows(self, outputs: Any) -> Tensor:
        return super().rows(require_one_tensor(outputs))

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        check_same_shape(outputs, targets)
        return flatten_rows(self.entry_nll(outputs, targets)).sum(1)

    def weighted_nll(self, outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        check_same_shape(outputs, targets)
        return (flatten_rows(self.entry_nll(outputs, targets)) * weights).sum(1)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        outputs = require_one_tensor(outputs)
        check_same_shape(outputs, targets)
        check_range(targets, torch.finfo(outputs.dtype).min, torch.finfo(outputs.dtype).max, "finite numbers")


class Wrapper(Likelihood):
    """A likelihood around another one, with its draws and its form."""

    family: Likelihood

    def rows(self, outputs: Any) -> Tensor:
        return self.family.rows(outputs)

    def write_out(self, outputs: Any) -> Any:
        return self.family.write_out(outputs)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> Any:
        return self.family.sample(outputs, generator)

    def fisher(self, rows: Tensor) -> Tensor:
        return self.family.fisher(rows)

    def mv(self, outputs: Tensor, tangents: Tensor) -> Tensor:
        return self.family.mv(outputs, tangents)

    def root(self, outputs: Tensor) -> Tensor:
        return self.family.root(outputs)

    def kl(self, outputs: Tensor, other: Tensor) -> Tensor:
        return self.family.kl(outputs, other)

    def check_targets(self, outputs: Any, targets: Any) -> None:
        self.family.check_targets(outputs, targets)


@dataclass(frozen=True)
class LogDensity(Likelihood):
    """The model's outputs are log p(x) of its inputs, one number per example; the loss is their mean, negated.

    No targets: `opt.loss(flow.log_prob(x))`. There are no labels to draw, so that the metric is the empirical Fisher
    E_x[s s^T] of the scores s = d log p(x) / d theta over the x that come: the Fisher where these are drawn from the
    model itself, and near it where the model fits its data. `opt.report()` says so. A model whose factors are
    classes, bits or normals with known parameters has the true Fisher with their likelihood instead, with x itself as
    targets: `nn.CrossEntropyLoss()` on the logits of an autoregressive model.

    Example:
        >>> class Normal(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.whiten = nn.Linear(3, 3)
        ...     def log_prob(self, x):
        ...         z, log_volume = self.whiten(x), torch.linalg.slogdet(self.whiten.weight)[1]
        ...         return log_volume - 0.5 * z.square().sum(1) - 2.7568
        >>> flow, x = Normal(), torch.randn(50, 3)
        >>> opt = ng.kfac(flow, ng.LogDensity())
        >>> opt.zero_grad()
        >>> opt.loss(flow.log_prob(x)).backward()
        >>> opt.step()
    """

    needs_targets: ClassVar[bool] = False
    note: ClassVar[str] = "metric: the empirical Fisher, of log p(x) at the x that came, not over draws of the model"

    def rows(self, outputs: Any) -> Tensor:
        log_p = require_one_tensor(outputs)
        if log_p.dim() == 0 or log_p.numel() != len(log_p):
            raise ValueError(
                f"the model's outputs have shape {tuple(log_p.shape)}, expected log p(x) of every example, (b,) or "
                "(b, 1): sum the log probabilities of its variables or tokens, and take no mean over examples"
            )
        return log_p.reshape(-1, 1)

    def nll(self, outputs: Any, targets: Any) -> Tensor:
        return -self.rows(outputs).squeeze(1)

    def sample(self, outputs: Any, generator: torch.Generator | None = None) -> None:
        """Nothing: there are no targets."""

    def check_targets(self, outputs: Any, targets: Any) -> None:
        self.rows(outputs)
        if targets is not None:
            raise ValueError(
                "targets came with LogDensity, expected none: the outputs are log p(x) already, so that the loss is "
                "opt.loss(log_p)"
            )


def read_weight(weight: Any, examples: int, like: Tensor) -> Tensor:
    """Weights of the examples, or of the rows, as (R, 1). ValueError or TypeError for anything else.

    like: (R, m).
    """
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight is {type(weight).__name__}, expected a tensor with a number >= 0 for each example")
    rows, weight = len(like), weight.detach().to(like)
    if weight.numel() not in (examples, rows) or weight.shape[:1] not in ((examples,), (rows,)):
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected ({examples},), one number per example")
    if not bool((weight.isfinite() & (weight >= 0)).all()):
        raise ValueError(f"weight has entries down to {float(weight.min()):.4g}, expected finite numbers >= 0")
    each = weight.reshape(-1)
    return (each if len(each) == rows else each.repeat_interleave(rows // examples)).unsqueeze(1)


def differentiate_outputs(function: Callable[[Any], Tensor], outputs: Any) -> Any:
    """Gradient of a scalar tensor in a model's outputs, in their own layout."""
    with torch.enable_grad():
        points = map_tensors(outputs, lambda t: t.detach().requires_grad_())
        gradients = iter(torch.autograd.grad(function(points), list(leaves(points)), materialize_grads=True))
    return map_tensors(points, lambda _: next(gradients).detach())


def flatten_rows(tensor: Tensor) -> Tensor:
    """(b, ...) -> (b, m), for b = 0 too."""
    return tensor.reshape(len(tensor), tensor.shape[1:].numel())


def require_one_tensor(outputs: Any) -> Tensor:
    """The model's outputs as the one tensor that they are. ValueError for a tuple or dict of several."""
    if not isinstance(outputs, Tensor):
        raise ValueError(
            f"the model's outputs are a {type(outputs).__name__}, expected one tensor: give the optimizer or the "
            "metric outputs=lambda out: ... with the one that counts, such as out.logits; for several heads use "
            "ng.Heads((likelihood, width), ...)"
        )
    if outputs.is_complex():
        raise ValueError(
            f"the model's outputs are {outputs.dtype}, expected real numbers: return their real and imaginary parts, "
            "torch.view_as_real(outputs).flatten(1), and give the targets in the same way"
        )
    return outputs


def split_pair(outputs: Any, second: str) -> tuple[Tensor, Tensor]:
    """The two tensors of outputs (mean, `second`). ValueError for a dict, whose order may be another."""
    parts: list[Any] = list(outputs) if isinstance(outputs, (tuple, list)) else []
    if len(parts) != 2 or not all(isinstance(part, Tensor) for part in parts):
        raise ValueError(
            f"the model's outputs are a {type(outputs).__name__}{f' of {len(parts)}' if parts else ''}, expected a "
            f"tuple (mean, {second}) of two tensors: give the optimizer or the metric outputs=lambda out: ... that "
            "returns it"
        )
    return parts[0], parts[1]


def require_tensor_targets(targets: Any) -> Tensor:
    """The targets as the tensor that they are. TypeError for NumPy's arrays, lists and numbers."""
    if targets is None:
        raise TypeError(
            "targets is None, expected a tensor: call optimizer.loss(outputs, targets); for a model that returns "
            "log p(x) itself and has no targets, take ng.LogDensity() as the criterion"
        )
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"targets is {type(targets).__name__}, expected a tensor: convert it with torch.as_tensor(targets)"
        )
    return targets


def check_same_shape(outputs: Tensor, targets: Tensor) -> None:
    """ValueError unless outputs and targets have one shape: broadcasting would silently change the likelihood."""
    require_tensor_targets(targets)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, expected {tuple(outputs.shape)} like the outputs; "
            "reshape one of them, nothing is broadcast"
        )


def check_range(targets: Tensor, low: float, high: float, meaning: str) -> None:
    """ValueError unless every target lies in [low, high]."""
    least, most = read_scalars(targets.aminmax()) if targets.numel() else (low, high)
    if not (low <= least and most <= high):  # not with a NaN either
        raise ValueError(
            f"targets range from {least:.4g} to {most:.4g}, expected {meaning}; look at how the targets are coded, or "
            "take another likelihood"
        )
