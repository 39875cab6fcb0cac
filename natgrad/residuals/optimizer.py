"""`ng.residuals`: nonlinear least squares over named terms, the flat flow of the engine on residuals at points."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from natgrad.ground.checks import check_integer, check_precision, check_share
from natgrad.ground.exchanges import any_asks
from natgrad.ground.messages import Columns, explain_calls
from natgrad.ground.progress import Callbacks, join_callbacks, run_steps
from natgrad.ground.pure import set_modes_aside
from natgrad.ground.spaces import split_complex_parameters, trainable
from natgrad.optim import NaturalGradient, Objective, Solved, State, SystemEvidence
from natgrad.residuals.point_weights import PointWeights
from natgrad.residuals.stacked_rows import RowsOperator
from natgrad.residuals.system import (
    LinearisedTerms,
    ResidualMetric,
    System,
    check_derivatives,
    check_points,
    read_terms,
)
from natgrad.residuals.terms import Unknown
from natgrad.rules import Damping, LevenbergMarquardt, LineSearch, Rule
from natgrad.solvers import LeastSquares, RowSolver, Solution, Solver

Net = nn.Module | Mapping[str, Unknown] | Iterable[Unknown]
Sample = Callable[[torch.Generator], Mapping[str, Any]]

PROBE = 0.1
"""The step of the finite difference along the direction, as a share of it (Transtrum & Sethna 2012, section 4)."""
BEND = 0.375
"""The longest acceleration that is trusted, relative to the direction; the paper has 0.75 for twice that."""
ATTEMPTS = 5
"""How often the system of one step is solved, each time with more damping, until the rule takes its solution."""
IDLE = 1e-6
"""The share of the mean unit that every entry has, so that one that does nothing yet is damped too."""
SEED_DISTANCE = 1_000_003
"""Between the seeds of two processes' points."""


@explain_calls
def residuals(
    net: Net,
    terms: Mapping[str, Callable[..., Any]] | Callable[..., Any],
    weights: Mapping[str, float] | None = None,
    *,
    point_weights: Mapping[str, PointWeights] | None = None,
    lr: float = 1.0,
    damping: float | Damping | None = None,
    solver: Solver | None = None,
    rule: Rule | None = None,
    acceleration: bool = True,
    scaling: bool = True,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    params: Iterable[Any] | None = None,
    group: Any = None,
    on_trouble: Literal["skip", "raise"] = "raise",
) -> ResidualOptimizer:
    """Train a network so that residuals vanish: the loss sum_k w_k mean |r_k|^2 over named terms, each on its points.

    A term is a function of the network `u` and one point `x`, a tensor (d,): `u(x)`, `ng.grad(u, x)` and
    `ng.laplacian(u, x)` are its values and derivatives there; `torch.autograd.grad` works too. The library batches it.
    Points may be others at every step. Every step is Gauss-Newton's with Levenberg-Marquardt damping in units of the
    metric's own diagonal, and is bent by its geodesic acceleration; a step that would raise the loss is not taken.

    Args:
        net: The network. For several unknowns a list or a dict of modules and of parameters (coefficients to be found):
            a term then takes them in that order, `lambda u, k, x: ...`. Complex parameters of a module are trained by
            their real and imaginary parts, as in `ng.LogAmplitude`.
        terms: Name -> function of the unknowns and a point. It returns the residual, a tensor of any shape. A term on
            data takes more than the point: `lambda u, x, y: u(x) - y` and `step(data=(x, y))`.
        weights: w by name, default 1, the same at every step: what changes is data, `lambda u, x, w: w.sqrt() * u(x)`.
        point_weights: Weights of a term's points that follow its residuals, by name: `Causal` and `WhereLarge` of
            `natgrad.residuals`. They are fixed within a step.
        lr: Share of the step that is taken.
        damping: A strategy, in units of the metric's diagonal with `scaling`; default
            `ng.LevenbergMarquardt(1e-3, raise_by=3, lower_by=1/3, floor=1e-12, per="loss")`. A number stays constant.
        solver: Of the linear system; default `ng.LeastSquares()`, the smaller of the two Gram matrices.
        rule: How the solution becomes a step; default
            `ng.LineSearch(backtracks=1, sufficient=0)`: one that would raise the loss is not taken, and raises the
            damping.
        acceleration: True adds the second-order correction of the step: one more evaluation of the residuals.
        scaling: True damps every parameter in units of the largest diagonal entry of the metric so far, as MINPACK
            does; False damps all alike.
        momentum: Share of the last solution from which the next one starts, SPRING's mu in [0, 1]; for points that are
            drawn anew.
        weight_decay: Decoupled: theta <- (1 - lr * weight_decay) theta.
        params: What is trained, default all that require a gradient: as in torch.optim.
        group: The processes of `torch.distributed` that each have points of their own: loss, metric and step are those
            of all points together; default those of a `DistributedDataParallel` around the network.
        on_trouble: What a step does for a number that is not finite: "raise" or "skip", as in `ng.NaturalGradient`.

    Returns:
        An optimizer: `.step(inside=points, boundary=points)` takes one step and returns the loss before it,
        `.fit(steps, sample)` several on points that it draws; `.losses` has the mean square of every term,
        `.state_report()` how the step went.

    Raises:
        TypeError: For terms or unknowns of another kind.
        ValueError: For weights that belong to no term or are not positive.

    Reference:
        Mueller & Zeinhofer 2023 (energy natural gradients); Jnini et al. 2024 (Gauss-Newton natural gradients);
        Transtrum & Sethna 2012 (geodesic acceleration); More 1978 (scaling).

    Example:
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        >>> terms = {"inside": lambda u, x: ng.laplacian(u, x) + 1, "boundary": lambda u, x: u(x)}
        >>> opt = ng.residuals(net, terms, weights={"boundary": 10.0})
        >>> inside, ends = torch.rand(50, 1).double(), torch.tensor([[0.0], [1.0]]).double()
        >>> for _ in range(50):
        ...     loss = opt.step(inside=inside, boundary=ends)
        >>> bool(loss < 1e-6)  # u is x (1 - x) / 2
        True
    """
    model, unknowns = read_unknowns(net)
    system = read_terms(terms, unknowns, weights, point_weights)
    if damping is None:  # with a floor at 1e-12, or at the round-off of the parameters
        floor = max(1e-12, max(torch.finfo(p.dtype).eps for p in trainable(model).values()) * 8)
        damping = LevenbergMarquardt(1e-3, raise_by=3.0, lower_by=1 / 3, floor=floor, per="loss")
    return ResidualOptimizer(
        model,
        system,
        lr,
        acceleration,
        scaling,
        momentum,
        damping=damping,
        solver=LeastSquares() if solver is None else solver,
        rule=LineSearch(backtracks=1, sufficient=0.0) if rule is None else rule,
        weight_decay=weight_decay,
        params=params,
        group=group,
        on_trouble=on_trouble,
    )


class ResidualOptimizer(NaturalGradient):
    """What `ng.residuals` returns: build it by that.

    Args:
        model: The module whose parameters are trained.
        system: The terms.
        lr: Share of the step that is taken.
        acceleration: Whether the second-order correction is added.
        scaling: Whether damping is in units of the metric's diagonal.
        momentum: Share of the last solution from which the next one starts.
        **options: As `ng.NaturalGradient` has them.

    Attributes:
        model: The module, or the unknowns as one: its `state_dict` has the networks and the coefficients.
        losses: Name -> mean square of the term before the last step.
        history: What the last `fit` returned, or the one under way has so far: callbacks look there.
        system: The terms.
    """

    def __init__(
        self,
        model: Any,
        system: System,
        lr: float,
        acceleration: bool,
        scaling: bool,
        momentum: float,
        **options: Any,
    ) -> None:
        check_share("momentum", momentum)
        metric = ResidualMetric(system, (list(system.terms), system.weights, acceleration, scaling))
        super().__init__(model, metric, lr, warm_start=momentum, **options)
        self.detach()  # it reads no pass of the user's
        self.system, self.acceleration, self.scaling = system, acceleration, scaling
        self.losses: dict[str, float] = {}
        self._loss = torch.full((), math.nan)  # the last step's
        self.history = ResidualHistory(system.terms)

    @set_modes_aside
    @torch.no_grad()
    def step(self, closure: None = None, /, **points: Any) -> Tensor:  # type: ignore[override]
        """One step on these points.

        Args:
            closure: Of no use here: the terms say what the loss is.
            **points: The points of each term by its name, a tensor (b, d), or a tuple of tensors (b, ...) for a term
                that takes more than a point.

        With several processes (`group=`) these are this process's points; a term may have none on some of them.

        Returns:
            The loss before the step, the sum of weight times mean square over the terms. NaN for a step that was left
            out because a number was not finite.

        Raises:
            ValueError: For missing or unusable points; with `on_trouble="raise"` for a residual that is not finite.
        """
        if closure is not None:
            raise TypeError("step takes points and no closure: step(inside=x, boundary=y)")
        super().step(evidence=lambda: self._gather_evidence(points))
        return torch.full((), math.nan) if self.state_report().status == "skipped" else self._loss

    @set_modes_aside
    @explain_calls
    def fit(
        self,
        steps: int,
        sample: Sample | Mapping[str, Any],
        *,
        seed: int = 0,
        callback: Callbacks[ResidualOptimizer] | None = None,
        progress: bool | None = None,
    ) -> ResidualHistory:
        """Several steps, each on points drawn for it. Ctrl-C ends them after the last whole one.

        Args:
            steps: How many.
            sample: Called before each step with a `torch.Generator` on the network's device; returns the points of each
                term by its name, as `step` takes them. A dict of points stands for the same ones at every step.
            seed: The generator is seeded by this, by the number of steps so far and by the process: a run that goes on
                from a checkpoint draws what it would have drawn.
            callback: Called with this optimizer after each step, or a list of such functions; no more steps are taken
                if one returns True.
            progress: True for a line that shows how far it is, False for none; None for one where the standard error is
                a terminal.

        Returns:
            The loss and the mean square of every term, each before its step; NaN for a step that was left out.

        Raises:
            TypeError: If `sample` is no function and no dict, or returns no dict.

        Example:
            >>> net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
            >>> terms = {"inside": lambda u, x: ng.laplacian(u, x) + 1, "boundary": lambda u, x: u(x)}
            >>> opt, ends = ng.residuals(net, terms), torch.tensor([[0.0], [1.0]]).double()
            >>> def sample(generator):
            ...     inside = torch.rand(50, 1, generator=generator, dtype=torch.float64)
            ...     return {"inside": inside, "boundary": ends}
            >>> history = opt.fit(60, sample)
            >>> len(history["loss"]), history["loss"][-1] < 1e-6
            (60, True)
        """
        steps = check_integer("steps", steps, 0)
        call, device = join_callbacks(callback, "the optimizer"), next(iter(self._find_trained().values())).device
        if not isinstance(sample, Mapping) and not callable(sample):
            raise TypeError(
                f"sample is {type(sample).__name__}, expected a function of a torch.Generator that returns a dict of "
                "points by term, or such a dict: fit(100, {'inside': x, 'boundary': y})"
            )

        history = self.history = ResidualHistory(self.system.terms)

        def step() -> dict[str, float]:
            loss = float(self.step(**self._draw(sample, seed)))
            history.add(loss, {} if math.isnan(loss) else self.losses)
            return {"loss": loss, **self.losses}

        run_steps(step, "steps", steps, progress, lambda: any_asks(self.processes, call(self), device))
        return history

    def _draw(self, sample: Sample | Mapping[str, Any], seed: int) -> Mapping[str, Any]:
        """The points of the next step."""
        if isinstance(sample, Mapping):
            return sample
        generator = torch.Generator(next(iter(self._find_trained().values())).device)
        generator.manual_seed(seed + self.state_report().step + SEED_DISTANCE * self.processes.rank)
        try:
            points = sample(generator)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from inside of the function
            raise TypeError(f"sample is called with a torch.Generator, as in def sample(generator): {error}") from None
        if not isinstance(points, Mapping):
            raise TypeError(
                f"sample returned {type(points).__name__}, expected a dict of points by term: the terms are "
                f"{list(self.system.terms)}"
            )
        return points

    @set_modes_aside
    def evaluate(self, /, **points: Any) -> dict[str, Tensor]:
        """The residuals of the terms by name, shape (b, m) each, without a step.

        Args:
            **points: As for `step`, of the terms that are wanted.
        """
        params = self._find_trained()
        checked = check_points(self.system, points, params, "evaluate")
        return {name: self.system.terms[name].values(params, part) for name, part in checked.items()}

    def _find_trained(self) -> dict[str, Tensor]:
        active = {id(p) for group in self.param_groups for p in group["params"] if p.requires_grad}
        named = self.model.named_parameters() if isinstance(self.model, nn.Module) else self.model.items()
        return {name: p for name, p in named if id(p) in active}

    def _gather_evidence(self, points: Any) -> SystemEvidence:
        """What these points tell."""
        params, self.system.processes = self._find_trained(), self.processes
        now = self.system.linearise(params, points)
        self._loss, self.losses = now.loss, {name: float(value) for name, value in now.losses.items()}
        gradient = now.operator.rows.mv(now.residuals)
        check_derivatives(now, gradient)
        objective = ResidualObjective(self.system, now, params)

        def system(state: State) -> ResidualSystem:
            return ResidualSystem(self, objective, state.gather(objective.space).get("units"))

        return self.evidence(params, gradient, system, objective=objective, attempts=ATTEMPTS)


class ResidualSystem:
    """(G + level D) x = g + level D x_0, with the acceleration of its solution."""

    def __init__(self, optimizer: ResidualOptimizer, there: ResidualObjective, largest: Tensor | None) -> None:
        self.optimizer, self.there = optimizer, there
        self.operator, self.memory = there.now.operator, dict[str, Any]()
        self.largest = self.units = None  # the largest diagonal of G so far, and D
        if optimizer.scaling:
            rows, space = self.operator.rows, there.space
            diagonal = rows.squares()
            if not rows.is_written:  # a root that is not written out has one factor for a parameter: the mean
                named = space.unflatten(diagonal)
                diagonal = space.flatten({name: part.mean().expand(part.shape) for name, part in named.items()})
            self.largest = diagonal if largest is None else torch.maximum(diagonal, largest)
            mean = self.largest.mean()
            self.units = self.largest + torch.where(mean > 0, IDLE * mean, 1.0)
        self._damped: DampedSystem | None = None

    def solve(self, level: float, guess: Tensor | None) -> Solved:
        """The solution with the damping's number at `level`, from a guess (n,)."""
        level = self.optimizer.damping.amount(level, self.operator)
        if self._damped is None:
            self._damped = DampedSystem(self.optimizer.solver, self.operator, self.units, level)
        else:
            self._damped.change_damping(level)
        solution = self._damped.solve(self.there.now.residuals, guess)
        if self.optimizer.acceleration:  # with half that of the geodesic through the step (Transtrum & Sethna 2012)
            now, space = self.there.now, self.there.space
            moved = space.unflatten(space.flatten(self.there.params) - PROBE * solution.value)
            slope = -now.operator.rows.rmv(solution.value)
            bend = (2 / PROBE) * ((self.there.system.residuals(moved, now) - now.residuals) / PROBE - slope)
            if bool(torch.isfinite(bend).all()):
                solution = self._damped.accelerate(solution, bend, BEND)
        vectors = {} if self.largest is None else {"units": self.largest}
        return Solved(solution, level if self.units is None else level * self.units, vectors=vectors)


class ResidualObjective(Objective):
    """d -> the loss at theta + d on the step's points."""

    def __init__(self, system: System, now: LinearisedTerms, params: dict[str, Tensor]) -> None:
        super().__init__(params, now.operator.rows.space, float(now.loss))
        self.system, self.now = system, now

    def _evaluate(self, step: dict[str, Tensor]) -> float:
        if not any(bool(part.any()) for part in step.values()):
            return self.before
        return float(self.system.residuals(self._move(step), self.now).square().sum() / 2)

    def _differentiate(self, step: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
        there = self.system.linearise(self._move(step), self.now.points)
        return float(there.loss), self.space.unflatten(there.operator.rows.mv(there.residuals))

    def _move(self, step: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: p.detach() + step[name] for name, p in self.params.items()}


class DampedSystem:
    """(G + level D) x = U w with G = U U^T, solved as S G S with S = D^(-1/2); units: D (n,), None for the identity."""

    def __init__(self, solver: Solver, operator: RowsOperator, units: Tensor | None, level: float) -> None:
        self.solver, self.level = solver, level
        self.scale: Tensor | float = 1.0 if units is None else units.rsqrt()
        self.operator = RowsOperator(operator.rows.rescale(self.scale)) if isinstance(self.scale, Tensor) else operator
        # a solver may keep its factors for several right-hand sides
        self.factorised = solver.factorise(self.operator, level) if isinstance(solver, RowSolver) else None

    def change_damping(self, level: float) -> None:
        """Go to another level."""
        self.level = level
        self.factorised = None if self.factorised is None else self.factorised.change_damping(level)

    def solve(self, weights: Tensor, before: Tensor | None = None) -> Solution:
        """x, or with x_0 given the solution of (G + level D) x = U w + level D x_0, w (r,), x_0 (n,).

        That minimises |w - U^T x|^2 + level |x - x_0|^2 in D's norm: the momentum of SPRING (Goldshlager et al. 2024).
        """
        if before is None or not bool(before.any()):
            return self._restore(self._solve(weights))
        start, rows = before / self.scale, self.operator.rows
        seen = rows.rmv(start)
        rest = self._solve(weights - seen)
        image = rest.image + rows.mv(seen) + self.level * start
        return self._restore(replace(rest, value=rest.value + start, image=image))

    def accelerate(self, solution: Solution, bend: Tensor, limit: float) -> Solution:
        """x with the bend a / 2, (G + level D) a = U r'', unless a is longer than `limit` times x in D's norm.

        bend: r'', the second derivative of the residuals along x, (r,).
        """
        more = self._solve(bend).value if self.factorised is None else self.factorised.find_value(bend)
        if not bool(more.norm() <= limit * (solution.value / self.scale).norm()):  # False for a NaN
            return solution
        return replace(solution, bend=more * self.scale / 2)

    def _solve(self, weights: Tensor) -> Solution:
        if self.factorised is not None:
            return self.factorised.solve(weights)
        return self.solver.solve(self.operator, self.operator.rows.mv(weights), damping=self.level)

    def _restore(self, solution: Solution) -> Solution:
        """x from S^-1 x."""
        if not isinstance(self.scale, Tensor):
            return solution
        value, image = solution.value * self.scale, solution.image / self.scale
        return replace(solution, value=value, image=image, basis=None, iterates=())


class ResidualHistory(Columns):
    """Lists of equal length, one entry per step: `history["loss"]`, and the mean square of every term by its name.

    Args:
        terms: Their names. One that is called "loss" is not listed by itself.
    """

    def __init__(self, terms: Iterable[str]) -> None:
        super().__init__(("loss", *(name for name in terms if name != "loss")), "steps")

    def add(self, loss: float, terms: Mapping[str, float]) -> None:
        """Add one step.

        Args:
            loss: The weighted sum.
            terms: Name -> mean square of the term; NaN for those that are not given.
        """
        for name, column in self.items():
            column.append(loss if name == "loss" else terms.get(name, math.nan))


def read_unknowns(given: Any) -> tuple[nn.Module, Mapping[str, Unknown]]:
    """What is trained as one module, and the unknowns in a term's order by name, "" for a module alone.

    Complex parameters of modules become their real and imaginary parts, in place.
    """
    if isinstance(given, nn.Module) and not isinstance(given, (nn.ModuleDict, nn.ModuleList)):
        check_precisions("net", given)
        split_complex_parameters(given)
        return given, {"": given}
    if isinstance(given, (nn.ModuleList, Sequence)) and not isinstance(given, str):
        given = {f"unknown{i}": part for i, part in enumerate(given)}
    if not isinstance(given, (Mapping, nn.ModuleDict)):
        raise TypeError(
            f"net is {type(given).__name__}, expected a torch.nn.Module, or several unknowns: a list or a dict of "
            'modules and of parameters, {"u": net, "k": nn.Parameter(torch.tensor(1.0))}'
        )
    parts = dict(given.items())
    if not parts:
        raise ValueError("net is empty, expected at least one torch.nn.Module")
    networks_first = sorted(parts.values(), key=lambda part: not isinstance(part, nn.Module))
    dtypes = (p.dtype.to_real() for part in networks_first for p in list_parameters(part))
    dtype = next(dtypes, torch.get_default_dtype())  # of the first network, or coefficient where there is none
    for name, part in parts.items():
        check_unknown(name, part, dtype)
    for part in parts.values():
        if isinstance(part, nn.Module):
            split_complex_parameters(part)
    model = nn.Module()  # all of them as one, whose parameters an optimizer trains
    for name, part in parts.items():
        setattr(model, name, part)
    return model, parts


def list_parameters(part: Any) -> list[nn.Parameter]:
    """Those of a module, or the parameter itself."""
    return list(part.parameters()) if isinstance(part, nn.Module) else [part] * isinstance(part, nn.Parameter)


def check_unknown(name: Any, part: Any, dtype: torch.dtype) -> None:
    """TypeError or ValueError unless an unknown is a module or a parameter, under a usable name and of this dtype."""
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"net has an unknown called {name!r}, expected a name such as 'u'")
    if not isinstance(part, (nn.Module, nn.Parameter)):
        wrapped = f"; wrap a number: nn.Parameter(torch.tensor(1.0, dtype={dtype}))"
        hint = wrapped if isinstance(part, (Tensor, float, int)) else ""
        raise TypeError(f"net[{name!r}] is {type(part).__name__}, expected a module or a parameter{hint}")
    if isinstance(part, nn.Parameter) and part.is_complex():
        raise ValueError(
            f"net[{name!r}] is a parameter of {part.dtype}, expected a real one: give two, its real and its imaginary "
            "part, and write torch.complex(a, b) in the terms"
        )
    check_precisions(f"net[{name!r}]", part)
    for p in list_parameters(part)[:1]:
        if p.dtype.to_real() != dtype:
            like = f"{name} = nn.Parameter({name}.detach().to({dtype}))" if p is part else f"{name}.to({dtype})"
            raise ValueError(f"net[{name!r}] is {p.dtype}, the first network {dtype}, expected one precision: {like}")


def check_precisions(name: str, part: Unknown) -> None:
    """ValueError for parameters in half precision."""
    for p in list_parameters(part):
        check_precision(name, p.dtype, f"call {name}.double()")
