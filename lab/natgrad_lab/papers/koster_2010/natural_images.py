"""Simple cells from photographs: the two-layer model of Koster & Hyvarinen 2010, fitted by exact score matching.

log p(x; W, V) = -sum_h sqrt(1 + v_h . (W x)^2) + const on whitened patches: the rows of W become oriented, localised
filters, the rows of V pool those of like orientation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

import natgrad as ng
from natgrad.energies import TwoLayer
from natgrad.ground.linalg import eigh
from natgrad_lab.data import kodak, sample_photographs
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive, check_word, split_words
from natgrad_lab.experiments.training import follow_clock
from natgrad_lab.figures import draw_images, fill_lines, take_columns
from natgrad_lab.words import short

METHODS = ("feature blocks", "natural gradient", "Adam", "SGD-momentum")

PHOTOGRAPHS: dict[str, Callable[[], tuple[Tensor, ...]]] = {"kodak": kodak, "embedded": sample_photographs}
HELD_OUT = 500
FLAT = 0.1  # of the mean norm: patches below are left out, since a point that comes again has no lower bound
GAUGE = 0.1  # added to a patch's norm, in units of the mean norm, before dividing by it: flat patches stay small


@dataclass(frozen=True)
class KosterSettings(StudySettings):
    """What `--set` can change."""

    photographs: str = "kodak"  # or embedded: two that come with scikit-learn
    size: int = 16  # side of a patch, in pixels
    keep: int = 80  # principal components kept of size^2 - 1; as many features and as many pooling units
    patches: int = 50_000  # cut from the photographs
    batch: int = 100  # patches per step
    methods: str = "feature blocks,natural gradient,Adam,SGD-momentum"  # who runs, comma-separated
    seconds: float = 60.0  # of CPU time per method
    adam: float = 0.04  # learning rate of Adam, of .01 to .08; falls linearly to a twentieth
    sgd: float = 3e-4  # not tuned
    natural: float = 0.5  # learning rate of the natural gradient
    damping: float = 10.0  # .1, 1 and 10 were tried for some seconds
    radius: float = 0.1  # bound on a natural step's length
    products: int = 8  # with the metric per step, at most
    metric_batch: int = 100  # patches per step that the metric is taken on
    feature_rate: float = 0.5  # of blocks by features; falls linearly to a twentieth
    feature_damping: float = 0.01  # in units of the metric's mean diagonal; .001, .01, .03 and .1 were tried
    feature_radius: float = 0.03  # .03, .1 and .3 were tried
    feature_every: int = 20  # steps between two updates of the blocks
    feature_examples: int = 10  # of a batch, for an update

    def __post_init__(self) -> None:
        check_word(self, "photographs", PHOTOGRAPHS)
        check_counts(self, "keep", least=2, most=self.size**2 - 1)  # a patch has no mean
        check_counts(self, "patches", least=2 * HELD_OUT)
        split_words("methods", self.methods, METHODS)
        check_counts(self, "batch", "products", "metric_batch", "feature_every", "feature_examples")
        check_positive(self, "seconds", "adam", "sgd", "natural", "damping", "radius")
        check_positive(self, "feature_rate", "feature_damping", "feature_radius")


@dataclass(frozen=True)
class Patches:
    """Whitened patches (n, keep), and the maps between these and pixels, (size^2, keep) both."""

    train: Tensor
    test: Tensor
    whitening: Tensor
    dewhitening: Tensor


def patches(s: KosterSettings, seed: int) -> Patches:
    """Patches from random places, without their mean, divided by their norm, whitened by principal components."""
    generator = torch.Generator().manual_seed(seed)
    images = PHOTOGRAPHS[s.photographs]()
    each = -(-s.patches // len(images))
    drawn = torch.cat([cut(image, s.size, each, generator) for image in images])
    flat = drawn[torch.randperm(len(drawn), generator=generator)[: s.patches]]
    flat = flat - flat.mean(1, keepdim=True)
    norms = flat.norm(dim=1, keepdim=True)
    rough = norms.squeeze(1) > FLAT * norms.mean()
    flat, norms = flat[rough], norms[rough]
    flat = flat / (norms + GAUGE * norms.mean())
    values, vectors = eigh((flat.mT @ flat / len(flat)).double())
    deviations, axes = values[-s.keep :].sqrt().float(), vectors[:, -s.keep :].float()
    white = flat @ (axes / deviations)
    return Patches(white[HELD_OUT:], white[:HELD_OUT], axes / deviations, axes * deviations)


def cut(image: Tensor, size: int, count: int, generator: torch.Generator) -> Tensor:
    """Square patches from uniformly drawn places, (count, size^2)."""
    tops, lefts = (torch.randint(side - size + 1, (count,), generator=generator) for side in image.shape)
    pairs = zip(tops.tolist(), lefts.tolist(), strict=True)
    return torch.stack([image[top : top + size, left : left + size].flatten() for top, left in pairs])


def start(keep: int, seed: int) -> dict[str, Tensor]:
    """W orthogonal; V = exp(v) near the identity: every unit pools one feature at first, and next to nothing else."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.linalg.qr(torch.randn(keep, keep, generator=generator))[0].contiguous()
    V = 5 * torch.eye(keep) - 5 + 0.1 * torch.randn(keep, keep, generator=generator)
    return {"W": W.requires_grad_(), "V": V.requires_grad_()}


class Graphed(TwoLayer):
    """The model without its closed Jacobian of the score, which would be keep x 2 keep^2 numbers per example."""

    def score_jacobian(self, params: Any, inputs: Tensor) -> Any:
        return None


FEATURES = ({"W": 0, "V": 1},)
SHARES = (1.0, 0.5, 0.25, 0.0)  # of a step that are tried


@dataclass
class FeatureBlocks:
    """Natural steps with G_j = E[sum_i g_ij g_ij^T], g_ij the slope of d_i log p in (w_j, v_1j, ..., v_Hj).

    The blocks are means over some hundred steps: a step is tried on its batch, and shortened where it raises the loss.
    """

    params: dict[str, Tensor]  # {"W": (J, N), "V": (H, J)}, V before the link; changed in place
    model: TwoLayer  # the two-layer model, with its closed Jacobian
    lr: float  # learning rate
    damping: float  # of a block, in units of the mean of G's diagonal
    radius: float  # most root mean square change of the scores in one step, to first order
    every: int  # steps between two updates of the blocks
    examples: int  # of a batch, for an update
    decay: float = 0.95  # weight of the past in the blocks' averages at an update
    momentum: float = 0.9  # of the gradient's running mean
    count: int = 0
    memory: Any = None
    inverse: Any = None
    total: Any = None
    mean: Tensor = field(default_factory=lambda: torch.zeros(1))

    @torch.no_grad()
    def take_step(self, gradients: dict[str, Tensor], examples: Tensor) -> None:
        """Move W and V."""
        space = ng.Space(self.params)
        if self.count % self.every == 0:
            # the running averages and their damped inverse
            structure = ng.Blocks(self.decay, units=FEATURES)
            self.total, self.memory = structure.update(
                self.memory, ng.score_metric(self.model), self.params, examples[: self.examples]
            )
            self.inverse = self.total.inverse(self.damping * float(self.total.trace()) / self.total.size)
        self.count += 1
        flat = space.flatten(gradients)
        self.mean = torch.lerp(self.mean.to(flat), flat, 1 - self.momentum)
        direction = self.inverse.mv(self.mean / (1 - self.momentum**self.count))
        square = direction @ self.total.mv(direction) / examples.shape[1]
        move = self.lr * square.clamp(min=0).sqrt()
        self._move(space.unflatten(direction * (self.lr * (self.radius / move).clamp(max=1.0))), examples)

    def _move(self, step: dict[str, Tensor], examples: Tensor) -> None:
        """As much of the step, a half, a quarter or nothing, as does not raise the batch's loss."""
        loss, before = self.model.loss(self.params, examples), {name: p.clone() for name, p in self.params.items()}
        for share in SHARES:
            for name, p in self.params.items():
                p.copy_(before[name] - share * step[name])
            if share == 0 or bool(self.model.loss(self.params, examples) <= loss):  # False for a NaN
                return


def optimizers(s: KosterSettings) -> dict[str, Callable[[dict[str, Tensor], TwoLayer], Any]]:
    """The methods, by name."""
    return {
        "natural gradient": lambda params, model: ng.NaturalGradient(
            params,
            ng.score_metric(model),
            s.natural,
            solver=ng.CG(rtol=0.01, max_steps=s.products),
            damping=s.damping,
            rule=ng.TrustRegion(s.radius),
            warm_start=0.9,
        ),
        "feature blocks": lambda params, model: FeatureBlocks(
            params, TwoLayer(), s.feature_rate, s.feature_damping, s.feature_radius, s.feature_every, s.feature_examples
        ),
        "Adam": lambda params, model: torch.optim.Adam(params.values(), s.adam),
        "SGD-momentum": lambda params, model: torch.optim.SGD(params.values(), s.sgd, momentum=0.9),
    }


def training(run: PieceRun, method: str) -> Numbers:
    """Loss on held-out patches against CPU seconds and steps, and the filters at the end."""
    s: KosterSettings = run.settings
    data, params, model = patches(s, run.seed), start(s.keep, run.seed), Graphed()
    opt = optimizers(s)[method](params, model)
    generator = torch.Generator().manual_seed(run.seed)

    def step(share: float) -> None:
        x = data.train[torch.randint(len(data.train), (s.batch,), generator=generator)]
        if isinstance(opt, FeatureBlocks):  # the two rates that were tuned fall with the time that is left
            opt.lr = s.feature_rate * (1 - 0.95 * share)
        elif isinstance(opt, torch.optim.Adam):
            opt.param_groups[0]["lr"] = s.adam * (1 - 0.95 * share)
        move(opt, model, params, x, s.metric_batch)

    curve = follow_clock(run, s.seconds, 20, step, lambda: (held_out(model, params, data),))
    return {"curve": curve, "steps": curve[-1][1], **looks(params, data, s)}


def move(opt: Any, model: TwoLayer, params: dict[str, Tensor], x: Tensor, metric_batch: int) -> None:
    """One step, with the model's closed gradient."""
    with torch.no_grad():
        gradients = model.gradient(params, x)
    if isinstance(opt, FeatureBlocks):
        opt.take_step(gradients, x)
        return
    for name, p in params.items():
        p.grad = gradients[name]
    if isinstance(opt, ng.NaturalGradient):
        opt.observe(x[:metric_batch])
    opt.step()


def held_out(model: TwoLayer, params: dict[str, Tensor], data: Patches) -> float:
    """The loss on patches that were not trained on, some at a time."""
    with torch.no_grad():
        return torch.stack([model.loss(params, part) for part in data.test.split(100)]).mean().item()


def looks(params: dict[str, Tensor], data: Patches, s: KosterSettings) -> Numbers:
    """What excites every feature most, in pixels, its orientation and extent; and the pooling weights."""
    W, V = params["W"].detach(), params["V"].detach().exp()
    features = W @ data.dewhitening.mT  # (keep, size^2)
    images = features.view(-1, s.size, s.size)
    components = data.dewhitening.mT.reshape(-1, s.size, s.size)
    scaled = features / features.abs().amax(1, keepdim=True)
    return {
        "features": scaled.mul(100).round().tolist(),
        "pooling": V.mul(1000).round().div(1000).tolist(),
        "coherence": coherence(images).median().item(),
        "extent": extent(images).median().item(),
        "coherence of components": coherence(components).median().item(),
        "extent of components": extent(components).median().item(),
        "likeness": likeness(images, V).item(),
    }


def tensors(images: Tensor) -> tuple[Tensor, Tensor]:
    """The structure tensor's trace and complex orientation, summed over every image: (n,), (n,)."""
    down, right = (part.flatten(1) for part in torch.gradient(images, dim=(1, 2)))
    return (down**2 + right**2).sum(1), torch.complex((right**2 - down**2).sum(1), 2 * (down * right).sum(1))


def coherence(images: Tensor) -> Tensor:
    """How much of an image's slopes point one way, 0 for all ways alike to 1 for a grating: (n, h, w) -> (n,)."""
    trace, turned = tensors(images)
    return turned.abs() / trace


def extent(images: Tensor) -> Tensor:
    """The share of the pixels that holds three quarters of an image's energy: small where it is localised."""
    energy = images.flatten(1).square().sort(1, descending=True)[0].cumsum(1)
    return (energy < 0.75 * energy[:, -1:]).double().mean(1)


def likeness(images: Tensor, V: Tensor) -> Tensor:
    """cos 2 (angle between features), mean over pairs that a unit pools, by weight; 0 for pairs at random."""
    turned = tensors(images)[1]
    angles = turned / turned.abs()
    pairs = torch.einsum("hj,hk->jk", V, V)
    pairs.fill_diagonal_(0)
    cosines = (angles[:, None] * angles.conj()).real
    return (pairs * cosines).sum() / pairs.sum()


def tell(findings: Findings) -> Story:
    """Features and curves of the methods that are finished."""
    s = findings.settings
    methods = findings.collect(METHODS)
    best = min(methods, key=lambda method: median(ends(methods[method])))
    method = (
        f"{s.patches:,} patches of {s.size} x {s.size} pixels from random places of the photographs ({s.photographs}), "
        f"their mean taken off and divided by their norm, whitened by the {s.keep} leading of {s.size**2 - 1} main "
        f"components; {s.keep} features and {s.keep} units, W orthogonal and V = exp(v) near the identity at first. W "
        "and V are fitted together and without constraints (Koster & Hyvarinen keep rows at unit norm); exact score "
        f"matching, batches of {s.batch}, {s.seconds:g} s of CPU time each. Features are drawn as W times the "
        "inverse of the whitening: what the model finds in patches."
    )
    rows = []
    for name, runs in methods.items():
        numbers = (f"{median(run[key] for run in runs):.2f}" for key in ("coherence", "extent", "likeness"))
        rows.append((name, short(median(ends(runs))), f"{median(run['steps'] for run in runs):,}", *numbers))
    heads = ("", "held-out loss", "steps", "coherence", "extent", "likeness of pooled features")
    table = Table("At the end, medians over seeds", heads, tuple(rows))
    said = ", ".join(f"{name} {loss}" for name, loss, *_ in rows)
    verdict = f"Held-out loss after the same CPU time: {said}. {best} is lowest."
    sections = (
        Section("Loss", verdict, (table,), (_curves(methods, 0), _curves(methods, 1))),
        *(_section(name, runs[0], s.size) for name, runs in methods.items()),
    )
    run = methods[best][0]
    c, e = run["coherence"], run["extent"]
    return Story(
        "Simple cells from photographs",
        f"With the lowest loss ({best}) the slopes of the median feature point one way to {c:.0%} (main components: "
        f"{run['coherence of components']:.0%}), and {e:.0%} of the pixels hold three quarters of its energy "
        f"({run['extent of components']:.0%}). Features that one unit pools have like orientations: mean cosine of "
        f"twice the angle between them {run['likeness']:.2f}, 0 by chance.",
        method,
        sections,
    )


def ends(runs: list[Numbers]) -> list[float]:
    """The last losses."""
    return [run["curve"][-1][2] for run in runs]


def _curves(methods: dict[str, list[Numbers]], axis: int) -> Picture:
    lines = take_columns(methods, axis, 2)
    look = {"ylabel": "score matching loss, held-out patches", "xscale": ("linear", "log")[axis]}
    name = ("seconds", "steps")[axis]
    look["xlabel"] = ("CPU seconds", "steps")[axis]
    return Picture(f"loss-{name}", f"Against {name}", fill_lines(lines, look))


def _section(method: str, run: Numbers, size: int) -> Section:
    features, pooling = np.array(run["features"]).reshape(-1, size, size), np.array(run["pooling"])
    stem, rows = method.replace(" ", "-").lower(), -(-len(features) // 10)
    first, second = "First layer: features, the strongest pooled first", "Second layer: one unit a row, what it pools"
    # The units that pool most, each with its strongest features
    chosen = np.argsort(-pooling.sum(1))[:10]
    order = np.concatenate([np.argsort(-pooling[unit])[:10] for unit in chosen])
    pictures = (
        Picture(f"features-{stem}", first, _features(features, pooling, method), (7.0, 0.3 + 0.7 * rows)),
        Picture(
            f"pooling-{stem}", second, (lambda figure: draw_images(figure.subplots(), features[order], 10)), (7.0, 7.0)
        ),
    )
    verdict = f"{run['steps']:,} steps; coherence {run['coherence']:.2f}, extent {run['extent']:.2f}."
    return Section(method, verdict, (), pictures)


def _features(features: np.ndarray, pooling: np.ndarray, method: str) -> Callable[[Figure], None]:
    order, size = np.argsort(-pooling.max(0)), features.shape[1]

    def fill(figure: Figure) -> None:
        axes = figure.subplots()
        draw_images(axes, features[order], 10)
        title = f"{len(features)} features of photographs' patches, {size} x {size} pixels: {method}"
        axes.set_title(title, loc="left")

    return fill


def pieces(s: KosterSettings) -> tuple[Piece, ...]:
    """One per method."""
    names = split_words("methods", s.methods, METHODS)
    return tuple(Piece(name, f"{name}, {s.seconds:g} s", lambda run, n=name: training(run, n)) for name in names)


STUDY = Experiment(
    name="koster_2010_natural_images",
    summary="Koster & Hyvarinen's two-layer model on photographs: filters like simple cells",
    settings=KosterSettings,
    pieces=pieces,
    tell=tell,
    seeds=1,
    minutes=3,
    quick={"photographs": "embedded", "size": 8, "keep": 30, "patches": 10_000, "seconds": 10.0},
)
