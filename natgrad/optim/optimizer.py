"""The natural gradient as a `torch.optim.Optimizer`: metric x structure x solver x damping x rule."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.damping import as_damping
from natgrad.families import Criterion
from natgrad.metrics import Metric
from natgrad.operators import Operator
from natgrad.optim.aligned_passes import weigh_loss
from natgrad.optim.base import Called, ModelOptimizer, count_rows
from natgrad.optim.checkpoint import Checkpoint, Format, own_copy
from natgrad.optim.checks import (
    check_batches,
    check_choices,
    check_number,
    check_search,
    choose_metric,
    given_parameters,
    inputs_of,
    named_parameters,
)
from natgrad.optim.distributed import meet
from natgrad.optim.flat_step import (
    Point,
    check_loss,
    check_solution,
    commit,
    count_examples,
    describe_circumstances,
    find_changes,
    flat,
    is_bounded,
    judge,
    moves_finitely,
    quadratic,
    report_step,
    shift_blocks,
)
from natgrad.optim.guard import Guard, NotFiniteError, check_trouble, count_unmoved, watch_skipped
from natgrad.optim.joined_metric import unwrap_models
from natgrad.optim.joined_step import (
    check_in_step,
    join_choice,
    join_mean_loss,
    join_metric,
    join_objective,
    read_gradients,
    settle_ranks,
)
from natgrad.optim.last_pass import Recall, listen, overhear
from natgrad.optim.loss_metrics import chosen_outputs, metric_of_step
from natgrad.optim.objective import Objective, objective_of
from natgrad.optim.parallel_models import refuse_nested
from natgrad.optim.recipe_options import FlatOptions, FlatSettings, with_options
from natgrad.optim.recorded_pass import Data
from natgrad.optim.state_report import StateReport
from natgrad.pure import copy_tensors
from natgrad.rules import Memory, Rate, require_loss
from natgrad.solvers import Auto, Solution, Solver, Status
from natgrad.structures import Exact, as_preconditioner, exchanging

SAVED = frozenset({"damping", "memory", "steps", "failures", "refused", "generator"})


class NaturalGradient(ModelOptimizer):
    """theta <- theta + rule(-lr (G + damping I)^-1 g), G from any metric: the flat flow of the engine.

    The metric is taken on the inputs of the model's last training-mode forward, at the parameters before the step, with
    the same dropout masks; or on `observe(inputs)`. A density's metric is taken on the X of its last loss that went
    backward. A parameter whose gradient is None is left alone. Use `loss = opt.loss(outputs, targets)`, which tells the
    step the targets, the reduction and the loss's value: rules and dampings that re-evaluate the loss then need no
    closure, and replay the same pass. A step that would make a parameter infinite is counted and not taken. After an
    error or Ctrl-C in a step, parameters and state are as before it.

    Args:
        model: An `nn.Module`, or a dict of tensors when the metric is of a function f(params, x).
        metric: Which G: `ng.fisher(model, ...)`, ...
        lr: Learning rate.
        metrics: Several metrics by name, which add up. `observe({name: data})` before each step gives each its data.
        weights: What each of `metrics` is multiplied by, by name; default 1, as its term of the loss has it.
        **options: Structure, solver, damping, rule and more: `natgrad.optim.FlatOptions`.

    Raises:
        ValueError: At `step`, for no remembered forward, and where a rule needs a loss that it cannot evaluate.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.NaturalGradient(model, ng.fisher(model, nn.CrossEntropyLoss()), lr=0.5, damping=ng.Relative(0.1))
        >>> opt.zero_grad()
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
    """

    FORMAT = Format("natgrad.NaturalGradient", SAVED)
    LIMITS = dict.fromkeys(("lr", "weight_decay"), math.inf)

    @with_options(FlatOptions, FlatSettings)
    def __init__(
        self,
        model: nn.Module | Mapping[str, Tensor],
        metric: Metric | None = None,
        lr: float = 1.0,
        *,
        metrics: Mapping[str, Metric] | None = None,
        weights: Mapping[str, float] | None = None,
        **options: Unpack[FlatOptions],
    ) -> None:
        chosen, found = FlatSettings(**options), choose_metric(metric, metrics, weights)
        check_choices(found, chosen.structure, chosen.solver, chosen.rule)
        check_number("lr", lr)
        check_number("weight_decay", chosen.weight_decay)
        check_number("warm_start", chosen.warm_start, 1.0)
        check_batches(model, metric_batch=chosen.metric_batch, search_batch=chosen.search_batch)
        self.model, self._ranks = meet(model, chosen.group)
        refuse_nested(self.model)
        self.on_trouble = check_trouble(chosen.on_trouble)
        self.metric = found = unwrap_models(found)
        self.structure, self.solver = chosen.structure or Exact(), chosen.solver or Auto()
        self.damping, self.rule = as_damping(chosen.damping), chosen.rule or Rate()
        self.warm_start, self.train_in_eval = chosen.warm_start, chosen.train_in_eval
        self.metric_batch, self.search_batch = chosen.metric_batch, chosen.search_batch
        self.preconditioner = as_preconditioner(chosen.preconditioner, self.solver)
        self._named = named_parameters(self.model)
        defaults = {"lr": lr, "weight_decay": chosen.weight_decay} | self.rule.options
        super().__init__(given_parameters(chosen.params, self._named), defaults)
        self._level = self.damping.initial()
        self._memory: dict[str, Any] | None = None
        self._prepared: dict[str, Any] | None = None
        self._last = StateReport()
        self._skipped, self._unmoved = 0, 0  # steps in a row that were skipped, or that a search made of length 0
        self._judged, self._seen, self._guard = -1, 0, Guard()  # the damping's last look; examples
        self._recall = Recall(chosen_outputs(found), self._named.values())
        self._finalizer: weakref.finalize[..., Any] | None = None
        overhear(found, self._recall)
        if isinstance(self.model, nn.Module):
            self._finalizer = weakref.finalize(
                self, listen(self.model, self._recall, in_eval=self.train_in_eval).remove
            )

    # what the user calls around a step

    @property
    def criterion(self) -> Criterion:
        """The loss that the metric belongs to."""
        criterion = getattr(self.metric, "criterion", None)
        if isinstance(criterion, Criterion):
            return criterion
        raise TypeError(f"{type(self.metric).__name__} has no criterion; compute your loss yourself")

    def observe(self, inputs: Any, targets: Any = None, *, floor: float = 0.0) -> None:
        """Take the next step's metric on these inputs instead of the gradient's (unlabelled data, another batch).

        On other data than the gradient's, part of the gradient lies outside the metric's range and the step grows like
        1 / damping (Pascanu & Bengio, section 4); `state_report().outside` tells how large that part is.

        Args:
            inputs: As the model takes them; copied. For `metrics` a dict by their names.
            targets: For metrics that use them. For `metrics` a dict by the names of those that do.
            floor: The least damping of this step, in units of G, however far an adaptive strategy has lowered it.

        Raises:
            ValueError: For a negative floor.
        """
        check_number("floor", floor)
        self._recall.observed = Data(copy_tensors(inputs), copy_tensors(targets), None)
        self._recall.floor = floor

    def search_on(self, inputs: Any, targets: Any) -> None:
        """Evaluate the next step's trial points on these examples, so that it is not fitted to the gradient's alone.

        For rules and dampings that re-evaluate the loss (Vinyals & Povey 2012).

        Args:
            inputs: As the model takes them.
            targets: As the criterion takes them.

        Raises:
            TypeError: If the metric has no criterion, or the model is not a module.
            ValueError: Without targets or examples.
        """
        if not isinstance(self.model, nn.Module):
            raise TypeError("search_on needs an nn.Module to evaluate; with a dict of tensors pass a closure to step")
        self.criterion  # noqa: B018 - its error comes here rather than at the step
        check_search(inputs, targets)
        self._recall.searched = Data(copy_tensors(inputs), copy_tensors(targets), None)

    def state_report(self) -> StateReport:
        """How the last step went: KL moved, damping, reduction ratio, solver iterations and residual, failures."""
        return self._last

    def detach(self) -> None:
        """Take the hook off the model. Also happens when the optimizer dies."""
        if self._finalizer is not None:
            self._finalizer()

    def _record_loss(self, outputs: Any, targets: Any, value: Tensor, chosen: bool) -> None:
        self._settle()
        rows = count_rows(self.criterion, outputs)
        weight = weigh_loss(self._ranks, self.criterion, outputs, targets, value)
        self._recall.record_loss(self.criterion, outputs, targets, value, rows, weight, chosen=chosen)

    def _describer(self) -> Callable[[str, Tensor], tuple[str, int, int]]:
        total = sum(p.numel() for group in self.param_groups for p in group["params"])

        def describe(name: str, p: Tensor) -> tuple[str, int, int]:
            held = self.structure.count_numbers(p.numel(), total)
            held += sum(v.numel() for v in self.state[p].values()) if p in self.state else 0
            kind = self.structure.kind_of(name, self._memory) if p.requires_grad else "frozen"
            return kind, p.numel(), held

        return describe

    def _follow_groups(self) -> None:
        if isinstance(self.model, nn.Module):
            self._named = dict(self.model.named_parameters())

    def _rename(self, renamed: Mapping[str, str]) -> None:
        """Nothing is remembered of other coordinates than those of now."""
        self._memory = self._prepared = None
        self.state.update({self._named[name]: {} for name in renamed})
        super()._rename(renamed)

    # checkpoints

    def _labels(self) -> torch.Generator | None:
        return getattr(self.metric, "generator", None)

    def _write_extra(self) -> dict[str, Any]:
        generator = self._labels()
        return {
            "damping": self._level,
            "memory": self._memory or {},
            "preconditioner": self._prepared or {},
            "steps": self._last.step,
            "failures": self._last.failures,
            "refused": self._last.refused,
            "judged": self._judged,
            "seen": self._seen,
            "wild": self._guard.save()["wild"],
            "generator": None if generator is None else generator.get_state(),
        }

    def _by_parameter(self) -> dict[str, dict[str, Any]]:
        return {name: dict(self.state[p]) for name, p in self._named.items() if p in self.state}

    def _fit(self, saved: Checkpoint) -> Callable[[], None]:
        extra, first = saved.extra, next(iter(self._named.values()))
        memory, prepared = (own_copy(extra.get(key) or {}, first) or None for key in ("memory", "preconditioner"))

        def restore() -> None:
            self._level, self._memory, self._prepared = extra["damping"], memory, prepared
            self._last = StateReport(step=extra["steps"], failures=extra["failures"], refused=extra["refused"])
            self._judged, self._seen = extra.get("judged", -1), extra.get("seen", 0)
            self._skipped = self._unmoved = 0
            self._guard = Guard.load(extra.get("wild"), None)
            self.state.update({p: dict(numbers) for p, numbers in saved.state.items()})
            generator = self._labels()
            if generator is not None and saved.labels is not None:
                generator.set_state(saved.labels)

        return restore

    # one step

    def _settle(self) -> None:
        settle_ranks(self)

    def _list_settings(self) -> tuple[object, ...]:
        """What must be alike on all processes, for the same sums to be made everywhere."""
        return self.solver, self.damping, self.rule, self.preconditioner, type(self.metric).__name__

    def _count_steps(self) -> int:
        return self._last.step

    def _skip(self, trouble: NotFiniteError) -> None:
        self._last = replace(self._last.count_step(failed=True), status="skipped")
        self._guard, self._skipped = self._guard.follow_loss(None, taken=False), self._skipped + 1
        watch_skipped(self._skipped, self.model)

    def _step(self, called: Called) -> None:
        point = self._point()
        if point is not None:
            loss = join_mean_loss(self._ranks, self._recall, point.space.device)
            check_loss(loss, self._guard, is_bounded(self.metric), self._last.step)
            self._metric_data()  # what is missing there comes before what is missing for the loss
            with self._replaying():
                self._move(point, self._objective(point, called), loss)

    def _judges(self) -> bool:
        """Whether the damping looks at this step's ratio."""
        return self.damping.needs_ratio and self._last.step - self._judged >= (self.damping.every or 1)

    def _move(self, point: Point, objective: Objective | None, loss: Tensor | None = None) -> None:
        if self._judges() and objective is None:
            raise ValueError(
                f"damping {type(self.damping).__name__} compares the loss before and after the step: compute it with "
                "optimizer.loss(outputs, targets), or call optimizer.step(closure)"
            )
        require_loss(self.rule, objective)
        metric = metric_of_step(self.metric, self._recall, self.model, point.params)
        metric = join_metric(self._ranks, metric, self._recall, self.metric_batch is not None, point.space.device)
        operator, memory = self._operator(point, metric)
        solution, amount, prepared = self._solve(point, metric, operator)
        check_solution(solution)
        counts = count_examples(self.rule, operator, self._ranks, self._metric_data, self._seen)
        known = (objective, self.solver, self.metric, self._last.step, self._options(), counts)
        model = quadratic(point, operator, solution, amount, describe_circumstances(*known))
        remembered: Memory = {key: vector for key, vector in self._flat_state(point).items() if key != "solution"}
        step, told = self.rule.step(model, objective, remembered)
        kept: Memory = dict(told)
        ratio, refused = judge(self.damping, model, step, objective) if self._judges() else (None, False)
        # a loss that is not finite at the start already leaves nothing to compare with
        failed = not moves_finitely(point, step) or (objective is not None and math.isnan(objective.before))
        if failed or refused:
            step = model.nothing()
            kept = dict.fromkeys(kept, point.space.zeros())  # a fresh start
        failed = failed or solution.status is Status.NON_FINITE
        counted = self._last.count_step(failed, refused)
        report = report_step(counted, operator, point.gradient, model, step, solution, ratio)
        check_in_step(self._ranks, flat(step))
        level = self._level if ratio is None else self.damping.update(self._level, ratio)
        values: dict[str, Any] = {"_memory": memory, "_prepared": prepared, "_last": report, "_level": level}
        values["_skipped"] = self._skipped + 1 if failed else 0
        if self.rule.needs_loss and not (failed or refused):
            values["_unmoved"] = count_unmoved(self._unmoved, report.rate, report.gradient)
        judged = self._judged if ratio is None else self._last.step
        values |= {"_judged": judged, "_seen": int(counts.get("seen", self._seen))}
        values["_guard"] = self._guard.follow_loss(loss, not failed)
        decays = {} if failed or refused else self._rates("weight_decay")
        changes = find_changes(point, step, kept, solution, decays, keeps=self.warm_start > 0)
        # all of it is known now: an error or Ctrl-C so far has changed nothing
        commit(self._named, self.state, *changes, vars(self), values)
        watch_skipped(self._skipped, self.model)

    def _solve(
        self, point: Point, metric: Metric, operator: Operator
    ) -> tuple[Solution, float | Tensor, dict[str, Any] | None]:
        """(G + damping I) x = g: the solution, the damping, and the preconditioner's memory."""
        floor, system = self._recall.floor, operator
        if self.damping.per_block:
            system, amount = shift_blocks(operator, lambda part: max(self.damping.amount(self._level, part), floor))
            rest = amount if isinstance(amount, float) else 0.0
        else:
            amount = rest = max(self.damping.amount(self._level, operator), floor)
        solver, prepared = self._solver(point, system, rest, metric)
        return solver.solve(system, point.gradient, damping=rest, guess=self._guess(point)), amount, prepared

    @contextmanager
    def _replaying(self) -> Generator[None]:
        """Modules in the mode of the remembered pass; after an error the metric's generator goes back."""
        last, generator, report = self._recall.find_pass(), getattr(self.metric, "generator", None), self._last
        before = None if generator is None else generator.get_state()
        modes = last.modes_of(self.model) if last and isinstance(self.model, nn.Module) else nullcontext()
        try:
            with modes:
                yield
        except BaseException:
            if generator is not None and self._last is report:  # the step was not taken
                generator.set_state(before)
            raise

    def _point(self) -> Point | None:
        active = {id(p) for group in self.param_groups for p in group["params"]}
        found = read_gradients(self._ranks, self._named, active - self._gone, self._recall)
        return None if found is None else Point(*found, self._rates("lr"))

    def _operator(self, point: Point, metric: Metric) -> tuple[Operator, dict[str, Any]]:
        data = self._metric_data()
        own, structure, exchange = join_choice(self._ranks, metric, self.structure, data)
        with exchanging(exchange):
            return structure.update(self._memory, own, point.params, inputs_of(metric, data), random=data.random)

    def _metric_data(self) -> Data:
        return self._recall.metric_data(self.metric_batch, self._last.step)

    def _solver(
        self, point: Point, operator: Operator, damping: float, metric: Metric
    ) -> tuple[Solver, dict[str, Any] | None]:
        """The solver, with this step's preconditioner if there is one, and that one's memory."""
        if self.preconditioner is None:
            return self.solver, None
        data = self._metric_data()
        own, preconditioner, exchange = join_choice(self._ranks, metric, self.preconditioner, data)
        with exchanging(exchange):
            inverse, memory = preconditioner.update(
                self._prepared, own, point.params, inputs_of(metric, data), damping, operator, data.random
            )
        return replace(self.solver, preconditioner=inverse), memory  # type: ignore[call-arg]

    def _objective(self, point: Point, called: Called) -> Objective | None:
        needed = self.rule.needs_loss or self._judges()
        # without trial points the loss of the pass is known already
        searched = self._recall.search_data(self.search_batch, self._last.step) if needed else None
        data = (self._recall, point.params, point.space, called, searched, needed)
        return join_objective(self._ranks, objective_of(self.model, lambda: self.criterion, *data), self._recall)

    def _guess(self, point: Point) -> Tensor | None:
        last = self._flat_state(point).get("solution")
        return None if last is None or self.warm_start == 0 else self.warm_start * last

    def _flat_state(self, point: Point) -> dict[str, Tensor]:
        """What is kept by parameter, as vectors (n,): "solution", and the rule's memory."""
        keys = {key for p in point.params.values() for key in self.state.get(p, {})}
        held = {name: self.state.get(p, {}) for name, p in point.params.items()}
        return {key: point.space.flatten({n: kept[key] for n, kept in held.items() if key in kept}) for key in keys}
