"""How far to follow a direction: the metric along it, measured on the pass of the step, and a bound on the KL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from natgrad.families import Bernoulli, Categorical, Criterion, Gaussian, Huber, Laplace
from natgrad.layers import Heard, Seen
from natgrad.optim.distributed import Ranks
from natgrad.optim.readings import Reading
from natgrad.optim.state import Length
from natgrad.typed_torch import as_tensor_like, list_numbers

SMALLEST, LARGEST = 1.0, 1e8  # below 1 the damping shortens a step, and that is what it is for
SLOWEST = 0.5  # that the ratio falls to, per measurement
FEWEST = 64  # examples that a measurement takes, if the pass has as many
PART = 4  # of the examples of a larger pass, one in so many


def measure_ratio(
    length: Length,
    sample: Reading,
    steps: Mapping[str, Tensor],
    promised: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    ranks: Ranks,
    penalty: Tensor | float = 0.0,
) -> Length:
    """The ratio of the true d^T G d to the d^T m that a block-diagonal metric promises for d = G~^-1 m, measured anew.

    Blocks leave out what layers do to each other, and factors what inputs and derivatives have in common: on
    classifiers and autoencoders the true form was .2 to 190 times the promised one, and not the same at the end as at
    the start. The minimum of the quadratic model along d is at m^T d / d^T G d = 1 / ratio. A form that is not finite
    makes the steps from here on shorter by a factor of ten.

    sample: a part of the step's pass. steps: d, by name. promised: the steps' d^T m, by parameter as they are. penalty:
    what the form has besides the metric.
    """
    form, whole = pool_form(sample, steps, promised, named, ranks)
    form = form + sum_rows(sample) * penalty
    before, fresh = length.ratio, form / whole
    falls = before is not None and bool(fresh < SLOWEST**2 * before)
    if before is not None:
        # a few examples carry the metric of a network that is nearly right, and a pass may miss them
        fresh = torch.maximum(fresh, SLOWEST * before)
    last = torch.ones_like(whole) if before is None else before
    fresh = torch.where(torch.isfinite(fresh), fresh, 10 * last.clamp(min=SMALLEST))
    # derivatives that vanish in the dtype at hand, steps of length 0: nothing was measured
    ratio = torch.where((form == 0) | ~(whole > 0), last, fresh).clamp(max=LARGEST)
    return replace(length, ratio=ratio, falls=falls)


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
    return pool_form(sample, moves, {}, named, ranks)[0] / sum_rows(sample) + penalty


def pool_form(
    sample: Reading,
    steps: Mapping[str, Tensor],
    promised: Mapping[str, Tensor],
    named: Mapping[str, Tensor],
    ranks: Ranks,
) -> tuple[Tensor, Tensor]:
    """step^T G step, and what was promised of the parameters that a process's sample covers; times the rows of all.

    Args:
        sample: A part of a pass, as `sampled` gives it.
        steps: A vector, by name.
        promised: By name, the same on all processes.
        named: The parameters.
        ranks: The processes that train the model: they get the same bits.
    """
    like, share = next(iter(steps.values())), sum_share(sample)
    squares, sums, names = squares_and_sums(sample, steps, named)
    covered = torch.tensor([name in names for name in promised], dtype=like.dtype, device=like.device)
    sums = torch.stack([as_tensor_like(one, like) for one in sums]) if sums else like.new_zeros(0)
    found = ranks.sum(torch.cat([share * as_tensor_like(squares, like).reshape(1), share**0.5 * sums, covered]))
    form = found[0] + found[1 : 1 + len(sums)].square().sum()
    parts = zip(promised.values(), list_numbers(found[1 + len(sums) :]) if promised else [], strict=True)
    whole = [value.to(form) for value, processes in parts if processes > 0]
    return form, sum_rows(sample) * (torch.stack(whole).sum() if whole else torch.zeros_like(form))


def sum_rows(sample: Reading) -> float:
    """The rows of all processes."""
    return float(sample.rows if sample.span is None else sample.span.rows)


def sum_share(sample: Reading) -> float:
    """What this process's part weighs among them."""
    return float(sample.rows) if sample.span is None else sample.span.share


def sample_examples(reading: Reading) -> Reading:
    """A part of the examples, weighing as much as all: their memory outlives the backward pass.

    With several processes the same examples as one process would take of the joined batch, whoever has them.

    Parameters without a layer keep their scores, which are sums over examples.
    """
    examples, span = min((one.examples for one in reading.apart), default=0), reading.span
    kept, all_kept, total = min(examples, max(FEWEST, examples // PART)), 0, 0
    if span is None or not span.count or examples % span.count:
        all_kept, total = kept, examples
    else:
        kept, all_kept, total = span.count_kept(examples // span.count, FEWEST, PART)
    layers = list[Seen]()
    for one in reading.apart:
        if one.examples % examples == 0:  # rows of examples lie side by side; else the layer counts as unseen
            layers.append(one.take(slice(one.examples // examples * kept), (total / all_kept) ** 0.5))
    return Reading(Heard([]), reading.rows, layers, reading.scores, span=span)


def form_along(
    reading: Reading, steps: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> tuple[Tensor | float, list[str]]:
    """step^T G step from one pass, and the parameters that it covers: sum_i E[(score_i^T step)^2].

    score_i^T step over all layers of an example together, from the statistics' outer products, which are never written
    out. Parameters without a layer add the square of their summed scores, whose expectation over labels is the same.
    0 if nothing moved that was seen.
    """
    squares, sums, names = squares_and_sums(reading, steps, named)
    forms = [*([squares] if isinstance(squares, Tensor) else []), *(one.square() for one in sums)]
    return (torch.stack(forms).sum() if forms else 0.0), names


def squares_and_sums(
    reading: Reading, steps: Mapping[str, Tensor], named: Mapping[str, Tensor]
) -> tuple[Tensor | float, list[Tensor], list[str]]:
    """The layers' part of `form_along`, per cotangent score^T step of the other parameters, and all their names."""
    layers = [one for one in reading.apart if any(name in steps for name in one.layer.layout.names)]
    layers = [one for one in layers if len(one.deltas) == len(layers[0].deltas)]
    squares = form_of(layers, steps, named) if layers else 0.0
    names = [name for one in layers for name in one.layer.layout.names]
    sums, like = list[Tensor](), next(iter(steps.values()))
    for scores in reading.scores:
        rest = [(score * steps[name]).sum() for name, score in scores.items() if name in steps and name not in names]
        sums.append(torch.stack(rest).sum() if rest else like.new_zeros(()))
    return squares, sums, names + [name for scores in reading.scores[:1] for name in scores]


def form_of(layers: Sequence[Seen], steps: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> Tensor:
    """sum_i (score_i^T step)^2 over the layers together, summed over cotangents."""
    examples = min(one.examples for one in layers)
    if not examples:  # other processes have those that are measured
        return torch.zeros((), dtype=layers[0].deltas[0].dtype, device=layers[0].deltas[0].device)
    slopes = [slopes_of(one, steps, named, examples) for one in layers]
    return torch.stack(slopes).sum(0).square().sum()


def slopes_of(seen: Seen, steps: Mapping[str, Tensor], named: Mapping[str, Tensor], examples: int) -> Tensor:
    """score_i^T step of one layer, (cotangents, examples)."""
    layout, dtype = seen.layer.layout, seen.deltas[0].dtype
    whole = {n: (steps[n] if n in steps else torch.zeros_like(named[n])).to(dtype) for n in layout.names}
    return seen.slopes(layout.join(whole), examples)


def bounded_below(criterion: Criterion) -> bool:
    """Whether the loss is at least 0, so that a share of it says how much is left to gain."""
    family = getattr(criterion.family, "family", criterion.family)
    if isinstance(family, (Gaussian, Laplace, Huber)):  # a loss of torch counts no normalising constant
        return isinstance(criterion.loss, (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss))
    return isinstance(family, (Bernoulli, Categorical))
