"""Ratio matching and score matching where the truth is known, and a Boltzmann machine on binary images.

Three parts: a machine of a few spins learnt from its exact distribution; the precision of a Gauss-Markov field, whose
optimum is known in closed form; and couplings between all pixels of handwritten digits, by seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter
from torch import Tensor

import natgrad as ng
from natgrad.ground.linalg import eigh
from natgrad.ground.spaces import Space
from natgrad_lab.energies.boltzmann_images import CONTESTANTS, SETS, EnergyContestant, draws, images, train
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive, check_word, split_words
from natgrad_lab.figures import PALETTE, fill_lines, fill_strips, put_legend_below
from natgrad_lab.words import short

METHOD = (
    "The machine: log p(x) = h . s + sum J_ij s_i s_j + constant over spins s in {-1, 1}, all h and J drawn from N(0, "
    "scale^2). The data are its exact distribution: every state, weighted with its probability. All runs start at "
    "zero. Natural steps are undamped, at rate 1. Gradient descent has the best of ten rates, 1/64 to 8. KL is that "
    "from the truth to the model, in nats. The larger machine has its couplings scaled by sqrt(units / more units). "
    "The field: a square lattice, couplings -1, the diagonal such that the lowest eigenvalue of the precision is the "
    "one named; gradient descent has the best constant rate, 2 / (lowest + highest curvature). Images: mini-batches, "
    "biases started at the pixels' logits, the best of three rates per contestant on training images held out, "
    "seconds of processor time on one thread without evaluation."
)
LOSSES = ("ratio matching", "pseudo-likelihood", "maximum likelihood")  # their minimum is the truth
FAR = 1e3  # nats: a run that comes there has diverged
TWO_LOSSES = ("ratio matching", "pseudo-likelihood")

SCALES = (0.3, 0.6, 1.0)
RATES = tuple(2.0**power for power in range(-6, 4))  # of gradient descent; 8 diverges for every loss and scale
PARTS = ("exact", "field", "images")
FLOORS = (1.0, 0.1, 0.01, 0.001)  # the lowest eigenvalue of the field's precision


@dataclass(frozen=True)
class BoltzmannRatioSettings(StudySettings):
    """What `--set` can change. In full size: data=mnist seconds=120."""

    units: int = 6  # of the machine that is learnt from its exact distribution
    more: int = 12  # units of a larger one, for the natural gradient alone; 20 takes an hour
    goal: float = 1e-4  # KL in nats that ends a run
    steps: int = 20_000  # of gradient descent, at most
    field: int = 8  # the field is a lattice of field x field
    examples: int = 5000  # drawn from the field
    data: str = "digits"  # or mnist: 784 pixels, 307,720 parameters
    batch: int = 500  # images per step
    seconds: float = 6.0  # of training per run on images, processor time
    tuning: float = 0.4  # the part of it that a choice of rate gets
    looked_at: int = 2000  # test images
    sweeps: int = 200  # of Gibbs sampling, for the pictures
    parts: str = "exact,field,images"  # what is done, comma-separated
    methods: str = "all"  # or names of contestants on images, semicolons between
    tuning_seed: int = 100

    def __post_init__(self) -> None:
        check_counts(self, "units", least=2, most=10)
        check_counts(self, "more", least=2, most=20)
        check_counts(self, "field", least=2)
        check_counts(self, "steps", "examples", "batch", "looked_at", "sweeps")
        check_positive(self, "goal", "seconds", "tuning")
        check_counts(self, "tuning", least=0, most=1)
        check_word(self, "data", SETS)
        split_words("parts", self.parts, PARTS)
        self.contestants()

    def contestants(self) -> dict[str, EnergyContestant]:
        """Who runs on images."""
        if self.methods == "all":
            return CONTESTANTS
        return {name: CONTESTANTS[name] for name in split_words("methods", self.methods, CONTESTANTS, ";")}


def exact(run: PieceRun) -> Numbers:
    """For every scale and loss: KL after each natural step, and how many steps gradient descent takes."""
    s: BoltzmannRatioSettings = run.settings
    numbers: Numbers = {}
    for place, scale in enumerate(SCALES):
        known, numbers[f"{scale:g}"] = ExactMachine(s.units, scale, run.seed), {}
        for number, loss in enumerate(LOSSES):
            begun = (len(LOSSES) * place + number) / (len(SCALES) * len(LOSSES))
            numbers[f"{scale:g}"][loss] = compare_directions(run, known, loss, begun)
    return numbers


def compare_directions(run: PieceRun, known: ExactMachine, loss: str, begun: float) -> Numbers:
    """Both directions on one loss; gradient descent at the best of ten rates."""
    s: BoltzmannRatioSettings = run.settings
    rates = torch.tensor(RATES, dtype=torch.float64)
    taken = descend(known, loss, rates, s.goal, s.steps, lambda: run.advance(begun))
    reached = [(count, rate) for count, rate in zip(taken, RATES, strict=True) if count is not None]
    count, rate = min(reached, default=(None, None))
    return {
        "natural": natural(known, loss, s.goal, 100),
        "descent": count,
        "rate": rate,
        "path": [] if rate is None or count is None else path(known, loss, rate, count),
    }


class ExactMachine:
    """The machine of spins, the truth's probabilities q of all states, and gradients and metrics of the losses."""

    def __init__(self, units: int, scale: float, seed: int) -> None:
        self.machine = ng.Boltzmann(units, spins=True)
        generator = torch.Generator().manual_seed(seed)
        truth = self.machine.parameters(scale, generator=generator, dtype=torch.float64)
        self.space, self.states = Space(truth), self.machine.states
        with torch.no_grad():
            self.log_q = self.machine.log_probabilities(truth)
            self.q = self.log_q.exp()
            self.jacobian = self.machine.ratio_jacobian(truth, self.states)  # (S, N, K), the same everywhere
        v = self.machine.values(self.states)
        first, second = torch.triu_indices(units, units, 1)
        self.statistics = torch.cat([v, v[:, first] * v[:, second]], dim=1)  # (S, K)

    def gap(self, theta: Tensor) -> Tensor:
        """KL(truth, model) of every run, (R, K) -> (R,), in nats."""
        return ((self.log_q - (theta @ self.statistics.mT).log_softmax(1)) * self.q).sum(1)

    def gradient(self, loss: str, theta: Tensor) -> Tensor:
        """d loss / d theta of every run, (R, K) -> (R, K)."""
        if loss == "maximum likelihood":
            return ((theta @ self.statistics.mT).softmax(1) - self.q) @ self.statistics
        rows = self.jacobian.flatten(0, 1)  # (S N, K)
        ratios = theta @ rows.mT
        missed = torch.sigmoid(-ratios)
        slopes = -missed if loss == "pseudo-likelihood" else -2 * missed.square() * torch.sigmoid(ratios)
        return (slopes * self.q.repeat_interleave(self.machine.units)) @ rows

    def metric(self, loss: str, theta: Tensor) -> Tensor:
        """The Hessian of the loss at q = p with expectations over q: (K,) -> (K, K). Of likelihoods, over the model."""
        if loss == "ratio matching":
            return ng.ratio_metric(self.machine, weights=self.q).at(self.params(theta), self.states).dense()
        if loss == "maximum likelihood":
            p = (self.statistics @ theta).softmax(0)
            centred = self.statistics - p @ self.statistics
            return centred.mT @ (p.unsqueeze(1) * centred)
        rows = self.jacobian.flatten(0, 1)
        entries = ng.Bernoulli().curvature(rows @ theta) * self.q.repeat_interleave(self.machine.units)
        return rows.mT @ (entries.unsqueeze(1) * rows)

    def params(self, theta: Tensor) -> dict[str, Tensor]:
        """theta (K,) as the machine's parameters."""
        return {name: value.requires_grad_() for name, value in self.space.unflatten(theta.clone()).items()}


def descend(
    exact: ExactMachine, loss: str, rates: Tensor, goal: float, steps: int, heard: Callable[[], None]
) -> list[int | None]:
    """Steps of gradient descent from zero until KL <= goal at the best rate, at most 1 % too many; None for others."""
    theta = torch.zeros(len(rates), exact.space.size, dtype=torch.float64)
    look = 1
    for step in range(1, steps + 1):
        theta = theta - rates.unsqueeze(1) * exact.gradient(loss, theta)
        if step >= look:
            look = step + max(1, step // 100 if step >= 200 else 1)
            heard()
            reached = exact.gap(theta) <= goal
            if bool(reached.any()):
                return [step if r else None for r in reached.tolist()]
    return [None] * len(rates)


def natural(exact: ExactMachine, loss: str, goal: float, steps: int) -> list[float]:
    """KL after every undamped natural step at rate 1 from zero, the start first, until it is below the goal, or FAR."""
    theta = torch.zeros(exact.space.size, dtype=torch.float64)
    gaps = [exact.gap(theta.unsqueeze(0)).item()]
    while goal < gaps[-1] < FAR and len(gaps) <= steps:
        gradient = exact.gradient(loss, theta.unsqueeze(0)).squeeze(0)
        operator = ng.operators.DenseOperator(exact.metric(loss, theta))
        theta = theta - ng.natural_gradient(operator, gradient).value
        gaps.append(exact.gap(theta.unsqueeze(0)).item())
    return gaps


def path(exact: ExactMachine, loss: str, rate: float, steps: int) -> list[tuple[int, float]]:
    """(step, KL) of gradient descent at that rate, at steps that grow by a tenth."""
    theta = torch.zeros(1, exact.space.size, dtype=torch.float64)
    points, look = [(0, exact.gap(theta).item())], 1
    for step in range(1, steps + 1):
        theta = theta - rate * exact.gradient(loss, theta)
        if step >= look or step == steps:
            look = max(step + 1, int(1.1 * step))
            points.append((step, exact.gap(theta).item()))
    return points


def larger(run: PieceRun) -> Numbers:
    """Natural steps of ratio matching on a larger machine, couplings scaled to drive each unit as strongly."""
    s: BoltzmannRatioSettings = run.settings
    gaps: Numbers = {}
    for place, scale in enumerate(SCALES):
        run.advance(place / len(SCALES))
        known = ExactMachine(s.more, scale * math.sqrt(s.units / s.more), run.seed)
        gaps[f"{scale:g}"] = natural(known, "ratio matching", s.goal, 100)
    return gaps


def field(run: PieceRun) -> Numbers:
    """Precision recovery on a lattice: one natural step, and steps of gradient descent at its best rate."""
    return {f"{floor:g}": recover_optimum(run, floor, place / len(FLOORS)) for place, floor in enumerate(FLOORS)}


def recover_optimum(run: PieceRun, floor: float, begun: float) -> Numbers:
    """From the identity to the optimum; distances are relative to the optimum's length."""
    s: BoltzmannRatioSettings = run.settings
    model = ng.GaussMarkov(s.field**2, ng.vmc.square_edges(s.field, s.field, periodic=False))
    truth = laplacian(model, floor)
    x = model.condense(model.sample(truth, s.examples, generator=torch.Generator().manual_seed(run.seed)))
    space, params = Space(truth), model.parameters(torch.eye(model.size, dtype=torch.float64))
    best = space.flatten(model.fit(x)).detach()
    metric = ng.score_metric(model).at(params, x)
    loss = ng.score_matching_loss(model, params, x)
    gradient = space.flatten(dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True)))
    begin = space.flatten(params).detach()
    end = begin - ng.natural_gradient(metric, gradient).value
    curvature = metric.dense()
    low, high = eigh(curvature)[0][[0, -1]].tolist()
    steps = descent(run, curvature, begin - best, 2 / (low + high), 1e-3 * float(best.norm()), begun)
    return {
        "condition": high / low,
        "natural": float((end - best).norm() / best.norm()),
        "descent": steps,
        "truth": float((best - space.flatten(truth).detach()).norm() / best.norm()),
    }


def laplacian(model: ng.GaussMarkov, floor: float) -> dict[str, Tensor]:
    """Every edge at -1, the diagonal so large that the lowest eigenvalue is `floor`, for the constant vector."""
    first, second = torch.tensor(model.edges).T
    matrix = torch.zeros(model.size, model.size, dtype=torch.float64)
    matrix[first, second] = matrix[second, first] = -1.0
    return model.parameters(torch.diag(floor - matrix.sum(1)) + matrix)


def descent(run: PieceRun, curvature: Tensor, error: Tensor, rate: float, close: float, begun: float) -> int | None:
    """Steps of gradient descent on a quadratic until the error is that short; None if that takes over a million."""
    for step in range(1, 1_000_001):
        error = error - rate * (curvature @ error)
        if step % 1000 == 0:
            run.advance(begun)
        if float(error.norm()) <= close:
            return step
    return None


def choice(run: PieceRun) -> Numbers:
    """Every contestant's best rate, by its own loss on the last training images after a part of the seconds."""
    s: BoltzmannRatioSettings = run.settings
    held, among = images(s.data, s.looked_at).hold_out(), s.contestants()
    ends: Numbers = {}
    for place, (name, contestant) in enumerate(among.items()):
        ends[name] = {}
        for number, rate in enumerate(contestant.rates):
            run.advance((place + number / len(contestant.rates)) / len(among))
            *_, last = train(contestant, rate, held, s.batch, s.tuning * s.seconds, s.tuning_seed, 1)
            ends[name][str(rate)] = last[contestant.loss]
    return ends


def best(tried: Numbers) -> float:
    """The rate with the lowest loss; not finite counts as worst."""
    losses = {
        float(rate): math.inf if loss is None or not math.isfinite(loss) else loss for rate, loss in tried.items()
    }
    return min(losses, key=lambda rate: losses[rate])


def race(run: PieceRun) -> Numbers:
    """Test losses over seconds of every contestant at its rate, and draws from what it has learnt."""
    s: BoltzmannRatioSettings = run.settings
    shown, among, runs = images(s.data, s.looked_at), s.contestants(), {}
    for place, (name, contestant) in enumerate(among.items()):
        points: list[Numbers] = []
        for point in train(contestant, best(run.earlier["choice"][name]), shown, s.batch, s.seconds, run.seed):
            run.advance((place + min(0.99, point["seconds"] / s.seconds)) / len(among))
            points.append(point)
        params = points[-1].pop("params")
        runs[name] = {"points": points, "draws": draws(params, shown, 8, s.sweeps)}
    return {"side": shown.side, "contestants": runs, "real": shown.test[:: len(shown.test) // 8][:8].int().tolist()}


def tell(findings: Findings) -> Story:
    """Sections for the parts that are finished."""
    sections = []
    if findings.of("exact"):
        sections.append(_exact(findings))
    if findings.of("field"):
        sections.append(_field(findings.of("field"), findings.settings.examples))
    if findings.of("race"):
        sections.append(_images(findings))
    return Story("Boltzmann machines by ratio matching", _lead(findings), METHOD, tuple(sections))


def _lead(findings: Findings) -> str:
    said = []
    for scales in findings.of("exact")[:1]:
        counts = [(f"scale {s}", write_step_counts(findings.of("exact"), s, "ratio matching")) for s in scales]
        said += [f"{name}: {ours} natural steps, {theirs} of gradient descent" for name, (ours, theirs) in counts]
    return f"To KL {findings.settings.goal:g}: " + "; ".join(said) + "." if said else "Nothing exact is finished yet."


def write_step_counts(runs: Sequence[Numbers], scale: str, loss: str) -> tuple[str, str]:
    """Natural steps and gradient steps over the seeds, as ranges."""
    cells = [run[scale][loss] for run in runs]
    ours = [count_steps_to_goal(cell["natural"]) for cell in cells]
    return write_range(ours), write_range([cell["descent"] for cell in cells])


def count_steps_to_goal(gaps: Sequence[float | None]) -> int | None:
    """Steps until the goal; None for a run that diverged, which ends with a KL that is far or not a number."""
    return len(gaps) - 1 if gaps[-1] is not None and gaps[-1] < 1 else None


def write_range(counts: Sequence[int | None]) -> str:
    """Least to greatest; never: a run that did not get there."""
    there = sorted(count for count in counts if count is not None)
    if not there:
        return "never"
    span = f"{there[0]:,}" if there[0] == there[-1] else f"{there[0]:,} to {there[-1]:,}"
    return span if len(there) == len(counts) else f"{span}, {len(counts) - len(there)} of {len(counts)} never"


def _exact(findings: Findings) -> Section:
    runs, more = findings.of("exact"), findings.of("larger")
    scales, losses = list(runs[0]), list(runs[0][next(iter(runs[0]))])
    rows = []
    for scale in scales:
        for loss in losses:
            ours, theirs = write_step_counts(runs, scale, loss)
            rows.append((f"scale {scale}, {loss}", ours, theirs))
    for scale in scales if more else ():
        ends = write_range([count_steps_to_goal(run[scale]) for run in more])
        rows.append((f"scale {scale}, ratio matching, {findings.settings.more} units", ends, "not run"))
    table = Table(
        f"Steps to KL {findings.settings.goal:g}",
        ("", "natural gradient", "gradient descent, best rate"),
        tuple(rows),
        f"Over {len(runs)} seeds. Gradient descent had at most {findings.settings.steps:,} steps.",
    )
    units = findings.settings.units
    picture = Picture("exact", f"KL over steps, {units} units", _paths(runs, units), (9.0, 3.8))
    return Section(f"{units} spins, known exactly", _lead(findings), (table,), (picture,))


def _paths(runs: Sequence[Numbers], units: int) -> Callable[[Figure], None]:
    title = f"Boltzmann machine of {units} spins, exact: natural gradient (solid) and gradient descent (dashed)"
    seeds = f"first of {len(runs)} seeds with marks, the others faint" if len(runs) > 1 else "one seed"

    def fill(figure: Figure) -> None:
        for axes, scale in zip(figure.subplots(1, len(runs[0]), sharey=True, squeeze=False)[0], runs[0], strict=True):
            for number, run in reversed(list(enumerate(runs))):
                for colour, mark, (loss, ways) in zip(PALETTE, "os^", run[scale].items(), strict=False):
                    marked = {"marker": mark, "markersize": 4.5} if number == 0 else {"alpha": 0.3}
                    look = {"color": colour, **marked}
                    axes.plot(
                        range(len(ways["natural"])),
                        ways["natural"],
                        "-",
                        linewidth=1.8,
                        label=loss if number == 0 else None,
                        **look,
                    )
                    if ways["path"]:
                        steps, gaps = zip(*ways["path"], strict=True)
                        axes.plot(steps, gaps, "--", linewidth=1.2, markevery=max(len(steps) // 8, 1), **look)
            axes.set_xscale("symlog", linthresh=1)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
            axes.tick_params(axis="x", labelsize=7)
            axes.set_yscale("log")
            axes.set_ylim(1e-8, 30)  # a run that diverges leaves at the top
            axes.set_title(f"couplings from N(0, {scale}²)", loc="left", fontsize=10)
            axes.set_xlabel("steps")
        figure.axes[0].set_ylabel("KL in nats")
        figure.suptitle(f"{title}; {seeds}", x=0.01, ha="left", fontsize=9)
        put_legend_below(figure, figure.axes[0], 3)

    return fill


def _field(runs: Sequence[Numbers], examples: int) -> Section:
    rows = []
    for floor in runs[0]:
        cells = [run[floor] for run in runs]
        condition = short(statistics.median(cell["condition"] for cell in cells))
        left, truth = max(cell["natural"] for cell in cells), statistics.median(cell["truth"] for cell in cells)
        steps = write_range([cell["descent"] for cell in cells])
        rows.append((f"lowest eigenvalue {floor}", condition, f"1, to {left:.0e}", steps, f"{100 * truth:.1f} %"))
    heads = ("", "condition of the metric", "natural steps, distance left", "gradient descent to 1e-3")
    note = "Distances are relative to the optimum's length; the last column is the optimum's own, from few examples."
    worst = max(cell["natural"] for run in runs for cell in run.values())
    verdict = (
        f"One natural step from the identity ends at the optimum of score matching on {examples:,} examples, within "
        f"{worst:.0e}, whatever the condition; gradient descent pays for it in proportion."
    )
    table = Table("A lattice", (*heads, "from the truth"), tuple(rows), note)
    return Section("Precision of a Gauss-Markov field", verdict, (table,))


def _images(findings: Findings) -> Section:
    runs, chosen = findings.of("race"), findings.of("choice")
    names = list(runs[0]["contestants"])
    rows = tuple(_row(name, runs, chosen[0][name] if chosen else {}) for name in names)
    heads = ("", "rate", "steps", *(f"{loss}, {part}" for loss in TWO_LOSSES for part in ("test", "training")))
    table = Table(
        f"After {findings.settings.seconds:g} seconds", heads, rows, f"Means over {len(runs)} seeds (spread)."
    )
    pictures = [
        Picture(f"images-{n}", f"Test {loss}", _curves(runs, loss, findings.settings.data), (5.0, 3.9))
        for n, loss in enumerate(TWO_LOSSES)
    ]
    pictures.append(Picture("draws", "Draws by Gibbs sampling", _draws(runs[0]), (9.0, 1.2 * (len(names) + 1))))
    return Section(f"Pixels of digits ({findings.settings.data})", _verdict(runs), (table,), tuple(pictures))


def final(runs: Sequence[Numbers], name: str, loss: str) -> list[float]:
    """The last test loss of every seed; infinite where it is not a number."""
    ends = [run["contestants"][name]["points"][-1][loss] for run in runs]
    return [math.inf if value is None else value for value in ends]


def _verdict(runs: Sequence[Numbers]) -> str:
    said = []
    for loss in TWO_LOSSES:
        means = {name: statistics.fmean(final(runs, name, loss)) for name in runs[0]["contestants"]}
        first, second = sorted(means, key=lambda name: means[name])[:2]
        said.append(f"Lowest test {loss}: {first}, {short(means[first])}; next {second}, {short(means[second])}.")
    return " ".join(said)


def _row(name: str, runs: Sequence[Numbers], tried: Numbers) -> tuple[str, ...]:
    steps = statistics.fmean(run["contestants"][name]["points"][-1]["steps"] for run in runs)
    finite = {rate: loss for rate, loss in tried.items() if loss is not None}
    rate = min(finite, key=lambda r: finite[r]) if finite else "-"
    cells = []
    for loss in (f"{loss}{part}" for loss in TWO_LOSSES for part in ("", ", training")):
        values = final(runs, name, loss)
        cells.append(f"{short(statistics.fmean(values))} ({short(max(values) - min(values))})")
    return (name, rate, f"{steps:,.0f}", *cells)


def _curves(runs: Sequence[Numbers], loss: str, data: str) -> Callable[[Figure], None]:
    lines = {}
    for name in runs[0]["contestants"]:
        points = [[p for p in run["contestants"][name]["points"][1:] if p[loss] is not None] for run in runs]
        lines[name] = [([p["seconds"] for p in some], [p[loss] for p in some]) for some in points]
    axis = {"xlabel": "CPU seconds", "ylabel": f"{loss}, test images", "yscale": "log"}
    return fill_lines(lines, axis, f"Boltzmann machines on {data}: a line per seed")


def _draws(run: Numbers) -> Callable[[Figure], None]:
    shown: dict[str, Any] = {"test images": run["real"]}
    shown |= {name: numbers["draws"] for name, numbers in run["contestants"].items()}
    return fill_strips(shown, run["side"])


def pieces(settings: BoltzmannRatioSettings) -> tuple[Piece, ...]:
    """The exact machines, the field, and the images: first the rates, then the race."""
    of = {
        "exact": (
            Piece("exact", f"{settings.units} spins, exact", exact),
            Piece("larger", f"{settings.more} spins, exact", larger),
        ),
        "field": (Piece("field", "Gauss-Markov field", field),),
        "images": (Piece("choice", "Rates on images", choice, repeated=False), Piece("race", "Images", race)),
    }
    wanted = split_words("parts", settings.parts, PARTS)
    return tuple(piece for part in PARTS if part in wanted for piece in of[part])


STUDY = Experiment(
    "boltzmann_ratio",
    "Boltzmann machines by ratio matching and a Gauss-Markov field: exact, then on digits",
    BoltzmannRatioSettings,
    pieces,
    tell,
    seeds=3,
    minutes=3,
    quick={"seeds": 1, "seconds": 1.5, "more": 8},
)
