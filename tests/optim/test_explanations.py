"""What an optimizer says of its last steps follows from their numbers; advice is given where following it helps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import pair
from optim_models import CE, collect_warnings, flat, iterate, train_batches
from torch import Tensor, nn

import natgrad as ng
from natgrad.optim.report import CHANCE, KEPT, find_trend
from natgrad.rules import NoiseAware, SpectralDescent

Make = Callable[[nn.Module], Any]
INPUTS = torch.randn(200, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = (INPUTS @ torch.randn(6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).argmax(1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()


def kfac(**choices: Any) -> Make:
    return lambda model: ng.kfac(model, CE, estimate=ng.ExactLabels(), **choices)


def fisher_steps(**choices: Any) -> Make:
    return lambda model: ng.NaturalGradient(model, ng.fisher(model, CE), **choices)


def train(make: Make, steps: int = 6, schedule: Any = None) -> Any:
    """The loss after some steps, what the optimizer says then, and the optimizer."""
    opt = make(model := net())
    scheduler = schedule(opt) if schedule else None
    for _ in range(steps):
        iterate(opt, model, INPUTS, LABELS)
        if scheduler:
            scheduler.step()
    return float(CE(model(INPUTS), LABELS).detach()), opt.explain(), opt


def test_a_weight_decay_at_the_size_of_the_steps_is_told():
    """AdamW's .1 is multiplied by a rate of 1 here."""
    with pytest.warns(UserWarning, match=r"shrinks weights by 10\.0% in each step") as records:
        strong, text, _ = train(kfac(weight_decay=0.1), 20)
    assert len(records) == 1
    weak, silent, _ = train(kfac(weight_decay=1e-4), 20)
    assert strong > weak
    assert "shrinks weights by 10.0% in each step. Try: a smaller weight_decay" in text
    assert "weight_decay" not in silent


# which setting bounds a step: what is said is how much longer the step is without it

BOUNDS = {"kl_share": 1e-5, "max_kl": 1e-6, "move": 1e-3, "lr": 0.1, "radius": 1e-3}


@pytest.mark.parametrize(("name", "bound"), BOUNDS.items())
@pytest.mark.parametrize("rest", [{}, {"move": 0.02, "kl_share": 1e-2, "lr": 0.5}])
def test_a_bound_is_told_by_how_much_longer_the_step_is_without_it(name: str, bound: float, rest: dict[str, float]):
    """Also where other bounds hold the same step: without this one, they still do."""

    def step(value: float) -> tuple[Tensor, dict[str, float]]:
        chosen = {"max_kl": 10.0, "kl_share": 0.1, "move": 0.1, "lr": 1.0, "radius": 1.0} | rest | {name: value}
        rule = NoiseAware(max_kl=chosen["max_kl"], kl_share=chosen["kl_share"], move=chosen["move"])
        flat_steps = fisher_steps(lr=chosen["lr"], rule=ng.TrustRegion(chosen["radius"]))
        opt = (flat_steps if name == "radius" else kfac(lr=chosen["lr"], rule=rule))(model := net())
        before = flat(model)
        opt.loss(model(INPUTS), LABELS).backward()
        opt.step()
        return flat(model) - before, dict(opt.state_report().cuts)

    (bounded, cuts), (longer, _) = step(bound), step(1.0 if name == "lr" else 1e9)
    assert cuts[name] > 1.5
    assert float(longer.norm() / bounded.norm()) == pytest.approx(cuts[name], rel=1e-6)


# advice on the length: (name, as it is, as advised)

LARGER = [
    ("lr", kfac(lr=0.05), kfac(lr=0.5)),
    ("lr", kfac(lr=0.1, rule=ng.MeasuredLength()), kfac(lr=1.0, rule=ng.MeasuredLength())),
    ("kl_share", kfac(kl_share=1e-3), kfac(kl_share=2e-3)),
    ("max_kl", kfac(max_kl=1e-4), kfac(max_kl=2e-4)),
    ("move", kfac(), kfac(rule=NoiseAware(move=0.24))),
    ("kl_share", kfac(rule=SpectralDescent(kl_share=1e-4)), kfac(rule=SpectralDescent(kl_share=2e-4))),
    ("radius", fisher_steps(rule=ng.TrustRegion(1e-3)), fisher_steps(rule=ng.TrustRegion(2e-3))),
    ("radius", fisher_steps(rule=ng.Momentum(radius=1e-3)), fisher_steps(rule=ng.Momentum(radius=2e-3))),
]


@pytest.mark.parametrize(("name", "make", "advised"), LARGER)
def test_more_of_the_setting_that_bounds_the_steps_helps(name: str, make: Make, advised: Make):
    loss, text, _ = train(make)
    assert f"Try: a larger {name} (now " in text
    assert text.count("Try: ") == 1
    assert train(advised)[0] < loss - 1e-3


def test_a_lower_rate_helps_where_whole_steps_raise_the_loss():
    """A step of 2.5 times the way to the minimum of a parabola ends 1.5 times as far from it."""

    def fit(lr: float) -> tuple[float, str]:
        torch.manual_seed(0)
        model = nn.Linear(6, 1).double()
        metric = ng.fisher(model, ng.Gaussian())
        opt = ng.NaturalGradient(model, metric, lr=lr, damping=1e-9, rule=ng.Rate(), on_trouble="raise")
        return train_batches(opt, model, [(INPUTS, INPUTS.sum(1, keepdim=True))] * 5)[-1], opt.explain()

    loss, text = fit(2.5)
    assert "Try: a smaller lr (now 2.5)." in text
    assert text.count("Try:") == 1
    assert fit(1.25)[0] < 0.1 * loss


Told = tuple[Make, dict[str, Any], str, str | None]
SAID: dict[str, Told] = {  # what is run and how, what is said of it, and what is advised
    "a scheduler": (
        kfac(lr=0.1),
        {"schedule": lambda opt: torch.optim.lr_scheduler.ConstantLR(opt, 1.0)},
        "at 1 they would be 10 times as long",
        None,
    ),
    "whole steps": (fisher_steps(damping=0.1), {}, "Steps were taken in full", None),
    "whole steps of blocks": (kfac(rule=ng.Rate(), damping=0.1), {}, "Steps were taken in full", None),
    "too long steps": (fisher_steps(lr=3.0, rule=ng.TrustRegion(3.0)), {"steps": 10}, "", "a smaller radius (now 3)"),
    "damping": (kfac(damping=1e5), {}, "of G + damping along the steps", "less damping."),
    # the metric may as well be of other data than the gradient: less damping makes such steps longer
    "damping, no blocks": (lambda m: ng.natgrad_cg(m, CE, damping=1e4), {}, "divided by the damping alone", None),
    "a limit": (fisher_steps(solver=ng.CG(max_steps=1), damping=0.1), {}, "stopped at its limit", "a larger max_steps"),
    "an indefinite metric": (
        lambda m: ng.NaturalGradient(m, ng.hessian(m, CE), solver=ng.CG(), damping=1e-2),
        {},
        "negative curvature",
        "ng.gauss_newton in place of",
    ),
    "no rate": (kfac(lr=0.0), {}, "no parameter moves", None),
    "a ratio": (lambda m: ng.hessian_free(m, CE), {}, "the quadratic model predicts (ratio ", None),
    "many steps": (kfac(), {"steps": KEPT + 5}, f"over the last {KEPT} steps", "a larger move"),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_said_of_steps_and_advised(name: str):
    make, how, said, advised = SAID[name]
    text = train(make, **how)[1]
    assert said in text
    assert text.count("Try: ") == (advised is not None)
    assert f"Try: {advised or ''}" in text or advised is None


# advice on the rest


ADVICE = 'Try: rate="auto", or a schedule that lets lr fall to zero.'
Rate = Callable[[float], float]  # lr, of the share of the steps that were taken


def fit_noise(
    looks: Sequence[int], rate: str = "constant", falls: Rate | None = None, scheduled: bool = False
) -> list[tuple[float, str]]:
    """A linear model of labels drawn by chance: the loss on all of them after so many small batches, and what is said.

    falls: written into the groups, or given to a scheduler.
    """
    chance, batch, steps = torch.Generator().manual_seed(0), 20, max(looks)
    x = torch.randn(1000, 6, generator=chance, dtype=torch.float64)
    y = torch.multinomial((0.3 * x[:, :3] + x[:, 3:]).softmax(1), 1, generator=chance)[:, 0]
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    opt = ng.kfac(model, CE, rate=rate, estimate=ng.ExactLabels())  # type: ignore[arg-type]
    share = falls or (lambda _: 1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: share(i / steps)) if scheduled else None
    said = []
    for i in range(steps):
        rows = torch.randint(len(x), (batch,), generator=chance)
        if falls and not scheduler:
            opt.param_groups[0]["lr"] = falls(i / steps)
        train_batches(opt, model, [(x[rows], y[rows])])
        if scheduler:
            scheduler.step()
        if i + 1 in looks:
            said.append((float(CE(model(x), y).detach()), opt.explain()))
    return said


def test_a_rate_that_falls_helps_where_noise_limits_the_loss():
    """Losses of single batches rise and fall by chance, and what is said does not."""
    looks = (110, 160)
    constant, falling = fit_noise(looks), fit_noise(looks[:1], "auto")
    for _, text in constant:
        assert "mini-batch noise is larger than the gradient, so steps are spectral" in text
        assert text.count("Try:") == 1
        assert ADVICE in text
    for scheduled in (False, True):
        falling += fit_noise(looks[:1], falls=lambda share: 1.02 - share, scheduled=scheduled)
    for loss, told in falling:
        assert loss < constant[0][0] - 1e-3
        assert "Try:" not in told


def test_nothing_is_advised_against_noise_where_the_loss_falls():
    """Labels by chance that a net learns by heart: its gradients are noise to the end."""
    chance = torch.Generator().manual_seed(0)
    x, y = INPUTS[:100], torch.randint(3, (100,), generator=chance)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    opt = ng.kfac(model, CE)
    for _ in range(4):
        for _ in range(40):
            rows = torch.randint(100, (20,), generator=chance)
            train_batches(opt, model, [(x[rows], y[rows])])
        assert "so steps are spectral" in opt.explain()
        assert "Try:" not in opt.explain()


@pytest.mark.parametrize("rule", [SpectralDescent(), NoiseAware()])
def test_steps_that_a_share_of_no_loss_bounds_are_told(rule: Any):
    """In single precision the loss of labels that are fitted ends at zero, and so do steps."""
    torch.manual_seed(0)
    model, rows = nn.Linear(6, 3), torch.Generator().manual_seed(0)
    opt = ng.kfac(model, CE, rule=rule)
    with torch.no_grad():
        model.bias.copy_(torch.tensor([40.0, 0, 0]))
    for _ in range(KEPT):
        train_batches(opt, model, [(torch.randn(8, 6, generator=rows), torch.zeros(8, dtype=torch.long))])
    assert "changed no parameter: kl_share is a share of the loss, and of a loss of 0 is none" in opt.explain()
    assert "Try:" not in opt.explain()


@pytest.mark.parametrize("count", [5, 6, 7])
def test_a_trend_is_of_order_alone_and_seldom_found_by_chance(count: int):
    orders = list(itertools.permutations(range(count)))
    trends = [find_trend(order) for order in orders]
    assert max(trends) == find_trend(range(count)) >= CHANCE
    assert sum(abs(trend) >= CHANCE for trend in trends) < 0.06 * len(trends)
    for order, trend in zip(orders[::7], trends[::7], strict=True):
        assert find_trend([math.exp(3 * rank) for rank in order]) == trend == -find_trend(order[::-1])
    assert find_trend([1.0] * count) == 0


def test_on_trouble_shows_the_batch_that_was_left_out():
    advice = 'Try: on_trouble="raise" to stop at the first one, and look at its batch.'

    def meet(**choices: Any) -> str:
        opt = kfac(**choices)(model := net())
        train_batches(opt, model, [(x, LABELS) for x in (INPUTS, INPUTS, math.nan * INPUTS, INPUTS)])
        return opt.explain()

    assert "1 of the last 4 steps were skipped" in (text := meet())
    assert advice in text
    with pytest.raises(ValueError, match="is not finite; nothing was changed"):
        meet(on_trouble="raise")
    assert advice not in train(kfac(), 4)[1]


# what is told without advice


def test_a_loss_at_its_minimum_gets_no_advice():
    model = nn.Linear(6, 1).double()
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    opt = ng.NaturalGradient(model, ng.fisher(model, ng.Gaussian()))
    assert opt.explain().startswith("No step yet")
    train_batches(opt, model, [(INPUTS, torch.zeros(len(INPUTS), 1, dtype=torch.float64))] * 4)
    assert "The gradient is zero" in opt.explain()
    assert "Try:" not in opt.explain()


@pytest.mark.parametrize("recipe", [ng.kfac, ng.natgrad_cg])
def test_an_optimizer_shows_what_it_holds_and_how_its_last_step_went(recipe):
    opt = recipe(model := nn.Linear(4, 3).double(), CE)
    assert "last step: step 0  status no step yet" in repr(opt)
    opt.loss(model(INPUTS[:, :4]), LABELS).backward()
    opt.step()
    kind, width = opt.report()[0].structure, 8
    page, text = opt._repr_html_(), repr(opt)
    for shown in (f"{kind} for 2 parameters", f"{width * sum(row.memory for row in opt.report())} B", "step 1  loss"):
        assert shown in text
        assert shown in page
    assert "<td>group 0</td><td>" in page
    assert "lr " in page


# gradients that were not cleared

RECIPES: list[Callable[..., Any]] = [ng.kfac, ng.natgrad_cg, ng.hessian_free]


def loop(recipe: Callable[..., Any], before: Callable[[nn.Module, Any], Any], accumulate: int = 1) -> list[str]:
    """What a few steps warn of, with something done before each."""
    opt = recipe(model := net(), CE)

    def run() -> None:
        for _ in range(4):
            before(model, opt)
            for i in range(accumulate):
                (opt.loss(model(INPUTS[i::accumulate]), LABELS[i::accumulate]) / accumulate).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()

    return collect_warnings(run)


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_that_were_not_cleared_are_told_once_and_nothing_else_is_blamed(recipe: Callable[..., Any]):
    (text,) = loop(recipe, lambda model, opt: None)
    assert "call optimizer.zero_grad() before loss.backward()" in text


CLEAR: list[Callable[[nn.Module, Any], Any]] = [
    lambda model, opt: opt.zero_grad(),
    lambda model, opt: opt.zero_grad(set_to_none=False),
    lambda model, opt: model.zero_grad(),
    lambda model, opt: (opt.loss(model(INPUTS), LABELS).backward(), opt.zero_grad()),  # of inputs, for an attack
    lambda model, opt: (opt.loss(model(INPUTS), LABELS).backward(), model.zero_grad()),
    lambda model, opt: (opt.zero_grad(), sum(1e-9 * p.square().sum() for p in model.parameters()).backward()),
]


@pytest.mark.parametrize(
    ("recipe", "clear"), [*((RECIPES[0], clear) for clear in CLEAR), *pair(RECIPES[1:], CLEAR[::2])]
)
def test_gradients_that_were_cleared_are_not_told_of(recipe: Callable[..., Any], clear: Any):
    assert loop(recipe, clear) == []
    assert loop(recipe, clear, 2) == []
