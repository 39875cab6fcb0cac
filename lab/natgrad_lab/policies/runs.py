"""TRPO on CartPole-v1, Acrobot-v1 and Pendulum-v1, beside the TRPO of sb3-contrib where that is installed.

Every contestant has the same number of settings; each is tried from a seed of its own for `tuning` steps and judged by
its last deterministic evaluation, and the best runs from every seed. All act in the same number of environments, with
two tanh layers of 64 for the policy and as many for the critic, and are looked at by the same episodes.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import mean, median, stdev
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from natgrad_lab.experiments.base import LabError
from natgrad_lab.experiments.frame import Experiment, Findings, Numbers, Piece, PieceRun
from natgrad_lab.experiments.sections import Cell, Picture, Section, Story, Table
from natgrad_lab.experiments.settings import StudySettings, change_defaults, check_counts, check_word
from natgrad_lab.figures import INK, draw_band, fill_axes, look
from natgrad_lab.policies.players import NatgradPlayer, Peer, Player, PolicyChoice, learn_to_marks

TUNING_SEED = 1000
PLAYERS: dict[str, Callable[..., Player]] = {"natgrad": NatgradPlayer, "sb3": Peer}
NAMES = {"natgrad": "ng.TRPO", "sb3": "sb3-contrib's TRPO"}
GOALS = {
    "CartPole-v1": ((30_000, 475.0), (100_000, 500.0)),
    "Acrobot-v1": ((100_000, -85.0),),
    "Pendulum-v1": ((100_000, -180.0),),
}


@dataclass(frozen=True)
class PolicyRaceSettings(StudySettings):
    """What `--set` can change."""

    env: str = "CartPole-v1"  # of gymnasium
    steps: int = 100_000  # of all environments together
    tuning: int = 30_000  # steps of a tuning run
    envs: int = 8  # that a contestant acts in at once
    marks: str = "10000,20000,30000,45000,60000,80000,100000"  # steps at which the policy is evaluated, comma-separated
    episodes: int = 20  # of an evaluation
    peers: bool = True  # run sb3-contrib's agents too, where it is installed

    def __post_init__(self) -> None:
        check_word(self, "env", CHOICES)
        check_counts(self, "steps", "tuning", "envs", "episodes")
        self.looks(self.steps)

    def looks(self, steps: int) -> list[int]:
        """The marks up to `steps`, which is the last. LabError for marks that are no numbers."""
        try:
            marks = sorted({int(part) for part in self.marks.split(",")})
        except ValueError as error:
            raise LabError(f"marks is {self.marks}, expected numbers of steps such as 30000,100000") from error
        return [mark for mark in marks if 0 < mark < steps] + [steps]


# of the package's own collection of tuned settings, rl-baselines3-zoo, in as many environments as the others have
ZOO: dict[str, Any] = {"cg_damping": 1e-3, "gae_lambda": 0.98, "batch_size": 512, "n_critic_updates": 20}
PLAIN = {
    "natgrad": (
        PolicyChoice("defaults, batch 1024", {"batch": 1024}),
        PolicyChoice("batch 1024, radius .02", {"batch": 1024, "radius": 0.02}),
        PolicyChoice("batch 512", {"batch": 512}),
    ),
    "sb3": (
        PolicyChoice("defaults"),
        PolicyChoice("zoo", {"total": 1024, **ZOO}),
        PolicyChoice("zoo, VecNormalize", {"total": 1024, "scaled": True, **ZOO}),
    ),
}
SWING: dict[str, Any] = {"total": 2048, "gamma": 0.9, **ZOO, "n_critic_updates": 15}
SWINGING = {
    "natgrad": (
        PolicyChoice("batch 1024, gamma .9", {"batch": 1024, "gamma": 0.9}),
        PolicyChoice("batch 1024, gamma .9, radius .02", {"batch": 1024, "gamma": 0.9, "radius": 0.02}),
        PolicyChoice("batch 2048, gamma .9, radius .02", {"batch": 2048, "gamma": 0.9, "radius": 0.02}),
    ),
    "sb3": (
        PolicyChoice("defaults"),
        PolicyChoice("zoo", {**SWING, "use_sde": True, "sde_sample_freq": 4}),
        PolicyChoice("zoo without gSDE, VecNormalize", {**SWING, "scaled": True}),
    ),
}
ROLLING = {
    "natgrad": tuple(
        PolicyChoice(f"batch {size}, lambda .98", {"batch": size, "gae_lambda": 0.98}) for size in (1024, 512, 256)
    ),
    "sb3": (
        *PLAIN["sb3"][1:],
        PolicyChoice("zoo, VecNormalize, batch 256", {"total": 256, "scaled": True, **ZOO, "batch_size": 256}),
    ),
}
CHOICES: dict[str, dict[str, tuple[PolicyChoice, ...]]] = {
    "CartPole-v1": PLAIN,
    "Acrobot-v1": ROLLING,
    "Pendulum-v1": SWINGING,
}


def pieces(settings: PolicyRaceSettings) -> tuple[Piece, ...]:
    """Tuning runs of every contestant that can run, then the races: peers where they are installed."""
    there = settings.peers and importlib.util.find_spec("sb3_contrib") is not None
    able = [name for name in PLAYERS if there or name == "natgrad"]
    tuning = [
        Piece(f"tune-{name}-{i}", f"{NAMES[name]}, {choice.words}", partial(try_choice, name, choice), repeated=False)
        for name in able
        for i, choice in enumerate(CHOICES[settings.env][name])
    ]
    races = [Piece(f"race-{name}", f"{NAMES[name]} with its best setting", partial(run_best, name)) for name in able]
    return (*tuning, *races)


def try_choice(name: str, choice: PolicyChoice, run: PieceRun) -> Numbers:
    """One setting of one contestant, judged by its last look."""
    player = PLAYERS[name](run.settings, choice, TUNING_SEED)
    *_, last = learn_to_marks(player, run.settings, [run.settings.tuning], run.advance)
    return {"choice": choice.words, **last}


def run_best(name: str, run: PieceRun) -> Numbers:
    """The best setting of one contestant from one seed."""
    s: PolicyRaceSettings = run.settings
    choices = CHOICES[s.env][name]

    def judge(place: int) -> float:  # by the last look, and by the training return where looks are equal
        tuned = run.earlier[f"tune-{name}-{place}"]
        test, train = (-math.inf if tuned[key] is None else tuned[key] for key in ("test", "train"))
        return test + 1e-3 * max(train, -1e6)

    best = max(range(len(choices)), key=judge)
    player = PLAYERS[name](s, choices[best], run.seed)
    curve = list(learn_to_marks(player, s, s.looks(s.steps), run.advance))
    return {"choice": choices[best].words, "batch": player.batch, "curve": curve}


def tell(findings: Findings) -> Story:
    """Sections for what is finished."""
    s, races = findings.settings, findings.collect(NAMES, "race-{}")
    method = (
        f"{s.env}, {s.envs} environments at a time, networks of two tanh layers of 64 for policy and critic. Each "
        f"contestant has three settings, tried for {s.tuning} steps from a seed of their own; the best one runs from "
        f"every seed. A look is {s.episodes} episodes without exploration, from the same beginnings for everybody, at "
        "the last update before the mark. The training return is the mean of the last 20 training episodes, "
        "exploration and all. Seconds are of collecting and learning, looks left out."
    )
    tried = [(title, run) for name, title in NAMES.items() for i in range(9) for run in findings.of(f"tune-{name}-{i}")]
    rows = tuple((title, run["choice"], _number(run["test"]), _number(run["train"])) for title, run in tried)
    table = Table("Every setting", ("", "setting", "return", "training return"), rows)
    settings = Section("Settings", f"After {s.tuning} steps, one seed.", (table,))
    sections = (_race(s.env, races), settings) if races else (settings,)
    return Story(f"Policies on {s.env}", _lead(s.env, races), method, sections)


def at(run: Numbers, mark: int, key: str = "test") -> float:
    """What a run showed at a mark; NaN where it did not look then."""
    value = next((point[key] for point in run["curve"] if point["mark"] == mark), None)
    return math.nan if value is None else value


def _lead(env: str, races: dict[str, list[Numbers]]) -> str:
    if "natgrad" not in races:
        return "ng.TRPO has not run yet."
    said = []
    for mark, goal in GOALS[env]:
        values = [at(run, mark) for run in races["natgrad"]]
        if not any(math.isnan(v) for v in values):
            verb = "reaches" if mean(values) >= goal else "misses"
            said.append(f"{mean(values):.1f} at {mark:,} steps, which {verb} the goal of {goal:g}")
    seeds = f"Means of {len(races['natgrad'])} seeds."
    return f"ng.TRPO: {'; '.join(said)}. {seeds}" if said else "No goal's mark was looked at."


def _race(env: str, races: dict[str, list[Numbers]]) -> Section:
    last = max(point["mark"] for runs in races.values() for point in runs[0]["curve"])
    marks = [mark for mark, _ in GOALS[env] if mark < last] + [last]
    heads = ("", "setting", *(f"return at {mark:,}" for mark in marks), f"training return at {last:,}", "s per update")
    rows = []
    for name, runs in races.items():
        tests = [_spread([at(run, mark) for run in runs]) for mark in marks]
        update = f"{median(run['curve'][-1]['update'] for run in runs):.2f}", f"of {runs[0]['batch']} steps"
        rows.append((NAMES[name], runs[0]["choice"], *tests, _spread([at(run, last, "train") for run in runs]), update))
    note = "Means over seeds with their standard deviation; below, the lowest and the highest seed."
    titles = {"test": "Return without exploration: median and quartiles over seeds"}
    titles["train"] = "Return of the training episodes: median and quartiles"
    pictures = tuple(Picture(key, title, _curves(env, races, key), (4.5, 3.6)) for key, title in titles.items())
    if len(races) < len(NAMES):
        verdict = f"{', '.join(NAMES[name] for name in NAMES if name not in races)} has not run."
    else:  # both beside each other at the last mark, in return and in time
        said = ", ".join(f"{NAMES[name]} {mean(at(run, last) for run in runs):.1f}" for name, runs in races.items())
        ours, theirs = (
            median(run["curve"][-1]["update"] / run["batch"] for run in races[name]) for name in ("natgrad", "sb3")
        )
        verdict = (
            f"At {last:,} steps: {said}. For a thousand steps we take {ours / theirs:.2f} of the other's time, each "
            "with its best setting; a fair clock is `python -m benchmarks policy`."
        )
    return Section("Learning", verdict, (Table("Contestants", heads, tuple(rows), note),), pictures)


def _spread(values: list[float]) -> Cell:
    known = [v for v in values if not math.isnan(v)]
    if not known:
        return ("-", "")
    deviation = f" ± {stdev(known):.1f}" if len(known) > 1 else ""
    return (f"{mean(known):.1f}{deviation}", f"{min(known):.1f} to {max(known):.1f}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _curves(env: str, races: dict[str, list[Numbers]], key: str) -> Callable[[Figure], None]:
    def draw(axes: Axes) -> None:
        for name, runs in races.items():
            marks = [point["mark"] for point in runs[0]["curve"]]
            y, style = [[at(run, mark, key) for mark in marks] for run in runs], look(list(NAMES).index(name), 1.8)
            draw_band(axes, [mark / 1000 for mark in marks], y, NAMES[name], style, reach=0.25)
        marks, goals = zip(*GOALS[env], strict=True)
        at_marks = [mark / 1000 for mark in marks]
        axes.plot(at_marks, goals, marker="_", markersize=14, color=INK, linestyle="none", label="goal")
        axes.set_title(f"{env}: {' and '.join(NAMES[name] for name in races)}", loc="left")

    axis = {"xlabel": "steps in the environment, thousands", "ylabel": "return of an episode"}
    return fill_axes(draw, axis, columns=3)


def learn_policies(name: str, env: str, minutes: float, **defaults: Any) -> Experiment:
    """The experiment of one environment: the settings' defaults are its own."""
    kind = change_defaults(PolicyRaceSettings, env=env, **defaults)
    quick = {"seeds": 1, "steps": 15_000, "tuning": 5000, "marks": "5000,10000", "episodes": 5}
    summary = f"TRPO on {env} beside sb3-contrib's"
    return Experiment(f"policy_{name}", summary, kind, pieces, tell, seeds=5, minutes=minutes, quick=quick)


CARTPOLE = learn_policies("cartpole", "CartPole-v1", 20)
# thirty thousand steps are too early to choose by: what is at -100 then may end no better
ACROBOT = learn_policies("acrobot", "Acrobot-v1", 30, tuning=100_000)
PENDULUM = learn_policies("pendulum", "Pendulum-v1", 20)
