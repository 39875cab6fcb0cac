"""Figures of Malago's lectures (2023): KL balls of normals, flows of the polarization, and the convergence theorem."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import Tensor

from natgrad.families import Ising
from natgrad.flows import draw_trajectory, paths
from natgrad.geometry import HalfPlane, Simplex, level_set
from natgrad.ground.linalg import solve_or_nan
from natgrad_lab.experiments.frame import Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, check_counts, check_positive
from natgrad_lab.figures import GRID, INK, PALETTE
from natgrad_lab.papers.malago_2023.flows import QUIET, panel, study


@dataclass(frozen=True)
class MalagoPointSettings(StudySettings):
    """What `--set` can change."""

    radius: float = 0.02  # of the balls, in nats; the lectures' epsilon
    problems: int = 20  # drawn at random
    starts: int = 5  # per problem
    bits: int = 6  # of a problem
    spread: float = 0.5  # standard deviation of the natural parameters at the start; not given in the lectures
    time: float = 40.0  # the last time of a flow

    def __post_init__(self) -> None:
        check_positive(self, "radius", "spread", "time")
        check_counts(self, "problems", "starts")
        check_counts(self, "bits", least=2, most=10)


def normal_kl(point: Tensor, others: Tensor) -> Tensor:
    """KL(N(m0, s0^2), N(m1, s1^2)), infinite where a deviation is not positive; (2,), (m, 2) -> (m,)."""
    (m, s), (n, t) = point.unbind(-1), others.unbind(-1)
    safe = torch.where(t > 0, t, 1.0)
    divergence = (safe / s).log() + (s.square() + (m - n).square()) / (2 * safe.square()) - 0.5
    return torch.where(t > 0, divergence, torch.inf)


CENTRES = [(m, s) for s in (0.5, 1.0, 1.75, 2.75) for m in (-3.0, -1.0, 1.0, 3.0)]


def balls(run: PieceRun) -> Numbers:
    """Around every centre: KL(centre, .) = radius, and Fisher-Rao distance sqrt(2 radius)."""
    radius, plane, rows = run.settings.radius, HalfPlane(), []
    for centre in CENTRES:
        at = torch.tensor(centre, dtype=torch.float64)
        scaled = torch.linspace(0, 2 * torch.pi, 73, dtype=torch.float64)
        rays = at[1] * torch.stack([scaled.cos(), scaled.sin() / 2**0.5], 1)
        exact = level_set(lambda x, at=at: normal_kl(at, x), at, radius, rays)
        tangent = rays / plane.norm(at, rays).unsqueeze(1) * (2 * radius) ** 0.5
        misfit = (normal_kl(at, plane.exp(at, tangent)) / radius - 1).abs().max()
        rows.append({"centre": centre, "ball": exact.tolist(), "geodesic": float(misfit)})
    return {"balls": rows}


def tell_balls(findings: Findings) -> Story:
    """One picture: balls that grow with the deviation."""
    radius, drawn = findings.settings.radius, findings.of("balls")[0]["balls"]
    wide = [max(x for x, _ in b["ball"]) - min(x for x, _ in b["ball"]) for b in drawn]
    ratio = [width / b["centre"][1] for width, b in zip(wide, drawn, strict=True)]
    verdict = (
        f"Every ball is {min(ratio):.3f} to {max(ratio):.3f} deviations wide, wherever it is: near σ = 0 a small "
        "step in the mean is a large one in nats. On the Fisher-Rao circle of radius sqrt(2 ε) the KL differs from "
        f"ε by up to {max(b['geodesic'] for b in drawn):.0%}."
    )

    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        for ball in drawn:
            x, y = zip(*ball["ball"], strict=True)
            axes.fill(x, y, color=PALETTE[1], alpha=0.18, linewidth=0)
            axes.plot(x, y, "-", color=PALETTE[1], linewidth=1.6)
            axes.plot(*ball["centre"], ".", color=INK, markersize=4)
        title, labels = f"KL(N(μ₀, σ₀²), N(μ, σ²)) = {radius:g}", ("mean μ", "standard deviation σ")
        panel(axes, title, labels, ((-4.2, 4.2), (0, 3.4)))
        axes.set_aspect("equal")

    section = Section("Balls", verdict, (), (Picture("balls", "Balls of constant KL", fill, (8.4, 4.0)),))
    method = "Exact level lines, by bisection along rays."
    return Story("KL balls of the univariate normal", verdict, method, (section,))


def polarization(p: Tensor) -> Tensor:
    """sum p_i^2 (1 - p_i), largest (1/4) for two equal camps."""
    return (p.square() * (1 - p)).sum(-1)


def slope(p: Tensor) -> Tensor:
    """Its partial derivatives, 2 p - 3 p^2."""
    return 2 * p - 3 * p.square()


def simplex_flows(run: PieceRun) -> Numbers:
    """Ascent and descent over three camps, Euclidean (projected) and natural."""
    space = Simplex()
    grid = [(i / 10, j / 10, 1 - (i + j) / 10) for i in range(1, 9, 2) for j in range(1, 10 - i, 2) if i + j < 10]
    starts = torch.tensor(grid, dtype=torch.float64) + torch.tensor([0.012, -0.007, -0.005], dtype=torch.float64)
    fields = {
        "Euclidean": lambda p: slope(p) - slope(p).mean(-1, keepdim=True),
        "natural": lambda p: space.natural(p, slope(p)),
    }
    times, flows = 60 * torch.linspace(0, 1, 121, dtype=torch.float64) ** 2.5, {}
    for number, (kind, field) in enumerate(fields.items()):
        for sign, word in ((1, "ascent"), (-1, "descent")):
            run.advance(number / 2)
            ways = paths(lambda p, f=field, s=sign: s * f(p), starts, times, lambda p: (p > 0).all(-1), 2)
            flows[f"{kind} {word}"] = [way[torch.isfinite(way).all(1)].tolist() for way in ways]
    return flows


def flat(p: Tensor) -> Tensor:
    """The triangle in the plane."""
    return torch.stack([p[..., 1] + p[..., 2] / 2, p[..., 2] * 3**0.5 / 2], -1)


def tell_polarization(findings: Findings) -> Story:
    """Triangles of three camps."""
    (flows,), rows = findings.of("flows"), []
    for name, ways in flows.items():
        ends = torch.tensor([way[-1] for way in ways], dtype=torch.float64)
        value, empty = polarization(ends), int((ends < 0.01).any(1).sum())
        rows.append((name, f"{value.min():.3f} to {value.max():.3f}", f"{empty} of {len(ways)}"))
    table = Table("Where the flows end", ("", "polarization", "with an empty camp (< .01)"), tuple(rows))
    verdict = (
        "Two equal camps, (1/2, 1/2, 0), are the most polarized, 1/4; one camp alone is the least, 0; at three "
        "equal ones, 2/9, the gradient vanishes and the second derivative too. The Euclidean flow runs into an "
        "edge and needs a projection to go on, the natural one turns along it."
    )
    pictures = (Picture("triangles", "Three camps: corners are unanimous", _triangles(flows), (11.0, 3.4)),)
    method = "Polarization sum p² (1 - p) over categorical distributions; Runge-Kutta of order 4. Starts are ours."
    return Story("Polarization", verdict, method, (Section("Three camps", verdict, (table,), pictures),))


def _triangles(flows: Numbers) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        for axes, (name, ways) in zip(figure.subplots(1, 4), flows.items(), strict=True):
            ticks = torch.linspace(0, 1, 81, dtype=torch.float64)
            a, b = torch.meshgrid(ticks, ticks, indexing="ij")
            keep = (a + b <= 1).flatten()
            p = torch.stack([a.flatten(), b.flatten(), 1 - a.flatten() - b.flatten()], 1)[keep]
            across, up = flat(p).T.numpy()
            axes.tricontour(across, up, polarization(p).numpy(), levels=16, colors=GRID, linewidths=0.9)
            corners = flat(torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]])
            axes.plot(*corners.T.numpy(), "-", color=QUIET, linewidth=1)
            for way in ways:
                draw_trajectory(
                    axes, flat(torch.tensor(way, dtype=torch.float64)), color=PALETTE[name.startswith("natural")]
                )
            axes.set_title(name, loc="left", fontsize=11)
            axes.set_aspect("equal")
            axes.axis("off")
        figure.suptitle("Polarization over three camps: level lines and flows", fontsize=11)

    return fill


def models(bits: int) -> dict[str, Ising]:
    """Independence, a chain, and all pairs."""
    singles = [(i,) for i in range(bits)]
    return {
        "independence": Ising(bits, singles),
        "chain": Ising(bits, [*singles, *((i, i + 1) for i in range(bits - 1))]),
        "all pairs": Ising(bits),
    }


def descend(model: Ising, values: Tensor, theta: Tensor, time: float, h: float = 0.05) -> Tensor:
    """The natural flow of E[f] in theta for rows of f's values (m, 2^n) and starts (m, k), until that time."""
    # its direction is minus the regression of f on the statistics under p
    table = model.statistics(model.states)

    def direction(at: Tensor, f: Tensor) -> Tensor:
        p = (at @ table.mT).softmax(1)
        centred = table - (p @ table).unsqueeze(1)
        weighted = p.unsqueeze(2) * centred
        covariance = centred.mT @ weighted
        right = weighted.mT @ f.unsqueeze(2)
        ridge = 1e-12 * torch.eye(model.size).to(at)
        return -solve_or_nan(covariance + ridge, right).squeeze(2)

    theta = theta.clone()
    for _ in range(round(time / h)):
        open_ = (theta @ table.mT).softmax(1).amax(1) < 0.999  # the others are decided and stay
        if not bool(open_.any()):
            break
        at, f = theta[open_], values[open_]
        middle = at + h / 2 * direction(at, f)
        theta[open_] = at + h * direction(middle, f)
    return theta


def theorem(run: PieceRun) -> Numbers:
    """Random pairwise problems: how many starts end at the optimum, model by model."""
    s: MalagoPointSettings = run.settings
    generator = torch.Generator().manual_seed(run.seed)
    pairs, counts = Ising(s.bits), {}
    weights = torch.randn(s.problems, pairs.size, dtype=torch.float64, generator=generator)
    values = weights @ pairs.statistics(pairs.states).mT  # (problems, 2^bits)
    best = values.argmin(1).repeat_interleave(s.starts)
    f = values.repeat_interleave(s.starts, 0)
    for number, (name, model) in enumerate(models(s.bits).items()):
        run.advance(number / 3)
        theta = s.spread * torch.randn(len(f), model.size, dtype=torch.float64, generator=generator)
        table = model.statistics(model.states)
        if name == "all pairs":  # the theorem's case: theta moves on a straight line
            rows = weights.repeat_interleave(s.starts, 0)
            ends = {t: theta - t * rows for t in (s.time, 10 * s.time)}
        else:
            ends = {s.time: descend(model, f, theta, s.time)}
        for t, end in ends.items():
            p = (end @ table.mT).softmax(1)
            counts[f"{name}, t = {t:g}"] = {
                "optimum": int((p.gather(1, best.unsqueeze(1)) > 0.5).sum()),
                "decided": int((p.amax(1) > 0.5).sum()),
                "parameters": model.size,
                "gap": float(((p * f).sum(1) - f.amin(1)).mean()),
            }
    return {"counts": counts, "runs": len(f)}


def tell_convergence(findings: Findings) -> Story:
    """A table over models, beside the numbers known before."""
    runs, s = findings.of("theorem"), findings.settings
    known = {f"independence, t = {s.time:g}": "43", f"chain, t = {s.time:g}": "54"}
    known |= {"all pairs, t = 40": "95", "all pairs, t = 400": "100"}
    rows, total = [], runs[0]["runs"]
    for name in runs[0]["counts"]:
        cells = [run["counts"][name] for run in runs]
        got = [cell["optimum"] for cell in cells]
        span = f"{min(got)} to {max(got)}" if min(got) < max(got) else str(got[0])
        gap = sum(cell["gap"] for cell in cells) / len(cells)
        earlier = known.get(name, "-") if total == 100 else "-"
        rows.append((name, str(cells[0]["parameters"]), span, earlier, f"{gap:.2g}"))
    reached = f"of {total} starts end at the optimum"
    heads = ("", "parameters", reached, "an earlier check", "E[f] above the minimum")
    note = (
        f"Over {len(runs)} seeds; at the optimum: its probability is above one half. The earlier check had other "
        "problems."
    )
    table = Table("Starts that reach the optimum", heads, tuple(rows), note)
    verdict = (
        f"With f in the span of the statistics, {rows[-1][2]} of {total} starts reach the optimum by t = "
        f"{10 * s.time:g} ({rows[-2][2]} by t = {s.time:g}); the independence model {rows[0][2]}, a chain "
        f"{rows[1][2]}: they stay in the local minima that they make."
    )
    picture = Picture("bars", "Starts that reach the optimum", _bars(runs), (6.0, 2.6))
    method = (
        f"{s.problems} problems per seed on {s.bits} bits in {{-1, 1}}, f = sum c_i x_i + sum c_ij x_i x_j with all c "
        f"from N(0, 1); {s.starts} starts each, theta from N(0, {s.spread:g}²). Natural flow of E[f] by the midpoint "
        "rule; for all pairs theta(t) = theta(0) - c t, as the theorem has it."
    )
    section = Section("The convergence theorem", verdict, (table,), (picture,))
    return Story("f in the span of the statistics", verdict, method, (section,))


def _bars(runs: Sequence[Numbers]) -> Callable[[Figure], None]:
    def fill(figure: Figure) -> None:
        axes = figure.add_subplot()
        names = list(runs[0]["counts"])
        for place, name in enumerate(names):
            got = [run["counts"][name]["optimum"] / run["runs"] for run in runs]
            mean, spread = sum(got) / len(got), (min(got), max(got))
            axes.plot(
                spread, [-place] * 2, color=PALETTE[1], linestyle="-", linewidth=5, alpha=0.35, solid_capstyle="round"
            )
            axes.plot(got, [-place] * len(got), "o", color=INK, markersize=4, zorder=3)
            axes.text(1.03, -place, f"{mean:.0%}", va="center", fontsize=9)
        axes.set_yticks([-n for n in range(len(names))], names)
        axes.set(xlim=(0, 1.02), ylim=(0.5 - len(names), 0.5))
        axes.grid(visible=True, axis="x")
        axes.set_xlabel(f"share of {runs[0]['runs']} starts that end at the optimum (dots: seeds)", fontsize=9)
        figure.suptitle(
            "Quadratic functions of six bits, natural flows of three models", x=0.01, ha="left", fontsize=11
        )

    return fill


BALLS = study(
    *("kl_balls", "Balls of constant KL around univariate normals", MalagoPointSettings),
    *((Piece("balls", "Balls", balls, False),), tell_balls, 0.07),
)
POLARIZATION = study(
    *("polarization", "Flows of the polarization over three camps", MalagoPointSettings),
    *((Piece("flows", "Flows", simplex_flows, False),), tell_polarization, 0.08),
)
CONVERGENCE = study(
    *("convergence", "Natural flows on random problems: independent bits, a chain, and a model that holds f"),
    *(MalagoPointSettings, (Piece("theorem", "Random problems", theorem),), tell_convergence, 0.14),
    seeds=3,
)
