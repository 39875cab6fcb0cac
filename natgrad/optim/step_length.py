"""How far to follow a direction: the metric along it, measured on the pass of the step, and a bound on the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from natgrad.families import Bernoulli, Categorical, Criterion, Gaussian
from natgrad.layers.hearing import Heard
from natgrad.layers.moments import Seen
from natgrad.optim.distributed import Ranks
from natgrad.optim.pass_statistics import Reading

SMALLEST, LARGEST = 1.0, 1e8  # below 1 the damping shortens a step, and that is what it is for
SLOWEST = 0.5  # that the ratio falls to, per measurement
FEWEST = 64  # examples that a measurement takes, if the pass has as many
PART = 4  # of the examples of a larger pass, one in so many


class Stride:
    """The ratio of the true d^T G d to the d^T m that a block-diagonal metric promises for d = G~^-1 m.

    Blocks leave out what layers do to each other, and factors what inputs and derivatives have in common: on
    classifiers and autoencoders the true form was .2 to 190 times the promised one, and not the same at the end as at
    the start. The minimum of the quadratic model along d is at m^T d / d^T G d = 1 / ratio.

    ratio: None before the first measurement, which then counts as 1. Below 1 the damping shortens a step.
    sample: what the step's pass told, for the measurement of this step.
    """

    def __init__(self) -> None:
        self.ratio: Tensor | None = None
        self.sample: Reading | None = None

    def measure(
        self,
        steps: Mapping[str, Tensor],
        promised: Mapping[str, Tensor],
        named: Mapping[str, Tensor],
        ranks: Ranks,
        penalty: Tensor | float = 0.0,
    ) -> None:
        """Take the ratio from the sample, if there is one.

        A form that is not finite makes the steps from here on shorter by a factor of ten.

        Args:
            steps: d, by name.
            promised: The steps' d^T m, by parameter as they are.
            named: The parameters.
            ranks: The processes that train the model.
            penalty: What the form has besides the metric.
        """
        sample, self.sample = self.sample, None
        if sample is None:
            return
        found, names = form_along(sample, steps, named)
        whole = sum(promised[name] for name in names if name in promised)
        like = next(iter(promised.values()))
        pair = torch.stack([torch.as_tensor(part).to(like) for part in (found + penalty, whole)])
        found, whole = ranks.sum(sample.rows * pair)  # the same bits on all ranks, in the ratio too
        before = self.ratio
        fresh = found / whole
        if before is not None:
            # a few examples carry the metric of a network that is nearly right, and a pass may miss them
            fresh = torch.maximum(fresh, SLOWEST * before)
        last = torch.ones_like(whole) if before is None else before
        fresh = torch.where(torch.isfinite(fresh), fresh, 10 * last.clamp(min=SMALLEST))
        # derivatives that vanish in the dtype at hand, steps of length 0: nothing was measured
        self.ratio = torch.where((found == 0) | ~(whole > 0), last, fresh).clamp(max=LARGEST)

    def known_ratio(self, like: Tensor) -> Tensor:
        """What a step's length is divided by: the ratio, at least 1, on the device of `like`."""
        return torch.ones_like(like) if self.ratio is None else self.ratio.to(like).clamp(min=SMALLEST)


def measure_form(
    sample: Reading,
    moves: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    ranks: Ranks,
    penalty: Tensor | float = 0.0,
) -> Tensor:
    """moves^T G moves on the sample of a pass, over all processes.

    Args:
        sample: A part of a pass, as `sample_examples` gives it.
        moves: A vector, by name.
        named: The parameters.
        ranks: The processes that train the model.
        penalty: What the form has besides the metric.
    """
    rows, like = float(sample.rows), next(iter(moves.values()))
    found = torch.as_tensor(form_along(sample, moves, named)[0] + penalty).to(like)
    total, weight = ranks.sum(torch.stack([rows * found, torch.as_tensor(rows).to(found)]))
    return total / weight


def sample_examples(reading: Reading) -> Reading:
    """A part of the examples, weighing as much as all: their memory outlives the backward pass.

    Parameters without a layer keep their scores, which are sums over examples.
    """
    examples = min((len(one.activations) for one in reading.apart), default=0)
    kept = min(examples, max(FEWEST, examples // PART))
    layers = []
    for one in reading.apart:
        if len(one.activations) % examples == 0:  # rows of examples lie side by side; else the layer counts as unseen
            rows = len(one.activations) // examples * kept
            deltas = [d[:rows] * (examples / kept) ** 0.5 for d in one.deltas]
            layers.append(replace(one, activations=one.activations[:rows].clone(), deltas=deltas))
    return Reading(Heard([]), reading.rows, layers, reading.scores)


def form_along(
    reading: Reading, steps: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> tuple[Tensor | float, list[str]]:
    """step^T G step from one pass, and the parameters that it covers: sum_i E[(score_i^T step)^2].

    score_i^T step over all layers of an example together, from the statistics' outer products, which are never written
    out. Parameters without a layer add the square of their summed scores, whose expectation over labels is the same.
    0 if nothing moved that was seen.
    """
    layers = [one for one in reading.apart if any(name in steps for name in one.layer.layout.names)]
    layers = [one for one in layers if len(one.deltas) == len(layers[0].deltas)]
    forms = [form_of(layers, steps, named)] if layers else []
    names = [name for one in layers for name in one.layer.layout.names]
    for scores in reading.scores:
        rest = [(score * steps[name]).sum() for name, score in scores.items() if name in steps and name not in names]
        if rest:
            forms.append(torch.stack(rest).sum().square())
    names += [name for scores in reading.scores[:1] for name in scores]
    return (torch.stack(forms).sum() if forms else 0.0), names


def form_of(layers: Sequence[Seen], steps: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> Tensor:
    """sum_i (score_i^T step)^2 over the layers together, summed over cotangents."""
    examples = min(len(one.activations) for one in layers)
    slopes = [slopes_of(one, steps, named, examples) for one in layers]
    return torch.stack(slopes).sum(0).square().sum()


def slopes_of(seen: Seen, steps: Mapping[str, Tensor], named: Mapping[str, Tensor], examples: int) -> Tensor:
    """score_i^T step of one layer, (cotangents, examples)."""
    layout, dtype = seen.layer.layout, seen.deltas[0].dtype
    whole = {n: (steps[n] if n in steps else torch.zeros_like(named[n])).to(dtype) for n in layout.names}
    matrix = layout.join(whole)  # (G, o, d)
    if seen.by_token:
        image = matrix[0][seen.activations]
        if seen.padding is not None:
            image = image * (seen.activations != seen.padding).unsqueeze(-1)
    elif len(matrix) == 1:
        image = seen.activations @ matrix[0].mT
    elif matrix.shape[1] == 1:  # norms, depthwise convolutions
        image = (seen.activations * matrix[:, 0]).sum(-1, keepdim=True)
    else:
        image = torch.einsum("btgd,god->btgo", seen.activations, matrix)
    return torch.stack([(image * deltas).reshape(examples, -1).sum(1) for deltas in seen.deltas])


def bounded_below(criterion: Criterion) -> bool:
    """Whether the loss is at least 0, so that a share of it says how much is left to gain."""
    family = getattr(criterion.family, "family", criterion.family)
    if isinstance(family, Gaussian):  # nn.MSELoss counts no normalising constant, an ng likelihood does
        return isinstance(criterion.loss, nn.MSELoss)
    return isinstance(family, (Bernoulli, Categorical))
