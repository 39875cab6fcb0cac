"""Any function as the loss of a chosen likelihood, once it is seen to be one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from natgrad.families.base import Likelihood
from natgrad.families.criteria import Criterion, Entrywise, remake_with
from natgrad.families.discrete import Categorical
from natgrad.families.known_losses import as_criterion, describe
from natgrad.lapack import is_concrete
from natgrad.pure import leaves, map_tensors

Loss = Callable[[Any, Any], Any]


def likelihood(loss: Any, family: Any = None, *, probe: tuple[Any, Any] | None = None) -> Criterion:
    """A loss as the likelihood that it is -log p of, for `ng.kfac(model, ng.likelihood(loss, family))`.

    Losses of `torch.nn`, of `torch.nn.functional`, of timm and of transformers are recognised. Any other function
    loss(outputs, targets) -> scalar needs the likelihood: its gradient in the outputs is compared with that of -log p
    on a probe, and once more on the first batch, so that the metric belongs to the number that is minimised. The mean
    and the sum over rows, over entries, and the mean over examples of sums over their rows are told apart.

    Args:
        loss: What is minimised: loss(outputs, targets) -> scalar tensor.
        family: An `ng` likelihood, or a loss of `torch.nn` that has the same gradient, with its weights and ignored
            targets. Not needed for a loss that is recognised.
        probe: (outputs, targets), a small batch to compare on. None: drawn from the likelihood, as (b, C), (b, C, T).

    Returns:
        What an optimizer or a metric takes as its criterion.

    Raises:
        TypeError: For a loss that is not recognised, without a family.
        ValueError: If the loss is not the likelihood's, or if no probe can be drawn for it.

    Example:
        >>> def loss(outputs, targets):
        ...     return -outputs.log_softmax(1).gather(1, targets[:, None]).mean()
        >>> ng.likelihood(loss, ng.Categorical()).family
        Categorical()
    """
    if family is None:
        return as_criterion(loss)
    if not callable(loss) or isinstance(loss, type):
        raise TypeError(f"loss is {loss!r}, expected a function loss(outputs, targets) -> scalar tensor")
    reading = choose_reading(loss, family, probe)
    return remake_with(
        replace(reading, loss=CheckedLoss(loss, reading)), partial(likelihood, probe=probe), loss, family
    )


def choose_reading(loss: Loss, family: Any, probe: tuple[Any, Any] | None) -> Criterion:
    """What a loss is a mean or a sum of, by its gradient on probes.

    A drawn probe on which none agrees counts for nothing once one has agreed on another shape.
    """
    candidates = list(readings(family))
    probes = [probe] if probe is not None else list(draw_probes(candidates[0].family))
    left: list[Criterion] = []
    difference, trouble = "", ""
    for outputs, targets in probes:
        try:
            found = slope_of(loss, outputs, targets)
        except Exception as error:
            if probe is not None:
                raise
            trouble = trouble or f" ({type(error).__name__}: {error})"
            continue
        agreeing = [one for one in left or candidates if agree(found, slope_in_units(one, outputs, targets))]
        left = agreeing or left
        difference = difference or describe_difference(loss, candidates[0], found, outputs, targets)
    if left:
        return left[0]
    if difference:
        raise ValueError(difference)
    raise ValueError(
        f"no probe was drawn from {family} that {describe(loss)} takes{trouble}; give probe=(outputs, targets), a "
        "small batch of what the model returns and of its targets"
    )


class CheckedLoss:
    """A loss that is compared with its likelihood on the first batch.

    Args:
        loss: The function.
        reading: The likelihood's own loss, in the units that a probe told.
    """

    def __init__(self, loss: Loss, reading: Criterion) -> None:
        self.loss, self.reading, self.checked = loss, reading, False

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if not self.checked and all(is_concrete(t) for t in leaves(outputs)):
            found = slope_of(self.loss, outputs, targets)
            if not agree(found, slope_in_units(self.reading, outputs, targets)):
                difference = describe_difference(self.loss, self.reading, found, outputs, targets)
                raise ValueError(f"{difference}; for another layout of the outputs give probe=(outputs, targets) in it")
            self.checked = True
        return self.loss(outputs, targets)

    def __repr__(self) -> str:
        return describe(self.loss)


def readings(family: Any) -> Iterator[Criterion]:
    """The losses that a likelihood may stand for: what they are a mean or a sum of."""
    base = as_criterion(family)
    yield base
    if not isinstance(family, Likelihood):
        return

    def total(outputs: Any, targets: Any) -> Tensor:
        return family.nll(outputs, targets).sum()

    def per_example(outputs: Any, targets: Any) -> Tensor:
        return total(outputs, targets) / len(next(leaves(outputs)))

    def weigh(outputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        rows = family.rows(outputs)
        return rows.new_ones(len(rows)), rows.new_tensor(float(len(next(leaves(outputs)))))

    yield Criterion(family, total, summed=True)
    yield Criterion(family, per_example, weigh)
    if hasattr(family, "entry_nll"):
        entries = Entrywise(family)
        yield Criterion(entries, lambda outputs, targets: family.nll(outputs, targets).sum() / outputs.numel())


def draw_probes(family: Likelihood) -> Iterator[tuple[Any, Any]]:
    """Outputs and targets that a likelihood takes, of several shapes, where it can draw some."""
    generator = torch.Generator().manual_seed(0)
    dim = family.dim if isinstance(family, Categorical) else -1
    for shape in ((3, 4), (3, 4, 2) if dim == 1 else (3, 2, 4)):
        outputs = torch.randn(shape, generator=generator)
        try:
            targets = family.sample(outputs, generator)
            family.check_targets(outputs, targets)
        except Exception:  # noqa: BLE001 a likelihood of the user's, on a shape that it may not have
            continue
        yield outputs, targets


def slope_of(loss: Loss, outputs: Any, targets: Any) -> Tensor:
    """d loss / d outputs, all of it as one vector."""
    with torch.enable_grad():
        points = map_tensors(outputs, lambda t: t.detach().requires_grad_())
        value = loss(points, targets)
        if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
            came = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss returned {came}, expected one number that depends on the outputs; reduce it")
        found = torch.autograd.grad(value.reshape(()), list(leaves(points)), materialize_grads=True)
    return torch.cat([slope.reshape(-1) for slope in found])


def slope_in_units(reading: Criterion, outputs: Any, targets: Any) -> Tensor:
    """What `slope_of` is for a likelihood's own loss, as a mean or as a sum."""
    slopes = [slope.reshape(-1) for slope in leaves(reading.slope(outputs, targets))]
    return torch.cat(slopes) * torch.as_tensor(reading.scale(outputs, targets)).detach()


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two gradients in the outputs are one, within the round-off of their dtype."""
    if found.shape != expected.shape:
        return False
    bound = min(max(1e3 * torch.finfo(found.dtype).eps, 1e-6), 0.05)
    size = torch.maximum(found.abs().max(), expected.abs().max())
    error = (found - expected).abs().max()
    return bool(error <= bound * size) or not bool(torch.isfinite(size))


def describe_difference(loss: Loss, reading: Criterion, found: Tensor, outputs: Any, targets: Any) -> str:
    """What a loss is instead of -log p, and what to write."""
    expected = slope_in_units(reading, outputs, targets)
    square = float((expected * expected).sum())
    ratio = float((found * expected).sum()) / square if square > 0 else 0.0
    name, family = describe(loss), reading.family
    if ratio > 0 and agree(found, ratio * expected):
        return (
            f"{name} is {ratio:.4g} times the mean of -log p of {family} on this batch; give the likelihood of which "
            f"it is -log p (another sigma, another reduction), or multiply the loss by {1 / ratio:.4g}"
        )
    error = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
    return (
        f"{name} is not -log p of {family}: their gradients in the outputs differ by {error:.2g} of the largest entry; "
        "choose another likelihood, or write your own: a class on ng.Likelihood with nll(outputs, targets) and "
        "sample(outputs, generator)"
    )
