"""The natural gradient as a `torch.optim.Optimizer`: metric x structure x solver x damping x rule."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from natgrad.families import Criterion
from natgrad.ground.constants import UNKNOWN_SHARE
from natgrad.ground.pure import as_call, copy_tensors, keep_gradient_mode, map_tensors
from natgrad.ground.spaces import Space
from natgrad.ground.typed_torch import is_mapping, list_numbers, measure_norm
from natgrad.metrics import Metric
from natgrad.operators import Operator
from natgrad.optim.base import Called, Live, ModelOptimizer, count_rows
from natgrad.optim.checkpoint import Checkpoint, Format
from natgrad.optim.checks import (
    check_batches,
    check_choices,
    check_number,
    check_search,
    choose_metric,
    given_parameters,
    maximize_metric,
    named_parameters,
    refuse_maximize,
)
from natgrad.optim.flat_step import LinearSystem, MetricSystem, SystemChoices, SystemEvidence, is_bounded
from natgrad.optim.guard import check_trouble
from natgrad.optim.joined import (
    JoinedMetric,
    join_mean_loss,
    join_metric,
    join_objective,
    read_gradients,
    unwrap_models,
)
from natgrad.optim.objective import (
    Beside,
    Closure,
    Objective,
    Proximal,
    Reclose,
    chosen_outputs,
    metric_of_step,
    objective_of,
    proximal_of,
    tells_another,
)
from natgrad.optim.options import FlatOptions, FlatSettings, read_settings, with_options
from natgrad.optim.passes import BatchRecord, Data, listen, overhear
from natgrad.optim.processes import Processes, meet, refuse_nested, weigh_loss
from natgrad.optim.state import OutsideLosses, OwnGradients, State, SystemMemory
from natgrad.optim.step import Choices, StepReport
from natgrad.rules import SafeRate, as_damping
from natgrad.solvers import Auto
from natgrad.structures import Exact, as_preconditioner


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

    FORMAT = Format("system", "natgrad.NaturalGradient", frozenset({"damping", "memory", "generator"}))

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
        chosen, own_metric = read_settings(FlatSettings, options), choose_metric(metric, metrics, weights)
        check_choices(own_metric, chosen.structure, chosen.solver, chosen.rule)
        check_number("lr", lr)
        check_number("weight_decay", chosen.weight_decay)
        check_number("warm_start", chosen.warm_start, 1.0)
        check_batches(model, metric_batch=chosen.metric_batch, search_batch=chosen.search_batch)
        self.model, processes = meet(model, chosen.group)
        refuse_nested(self.model)
        self.on_trouble = check_trouble(chosen.on_trouble)
        self.metric = own_metric = unwrap_models(maximize_metric(own_metric) if chosen.maximize else own_metric)
        self.structure, self.solver = chosen.structure or Exact(), chosen.solver or Auto()
        self.damping, self.rule = as_damping(chosen.damping), chosen.rule or SafeRate()
        self.warm_start, self.train_in_eval = chosen.warm_start, chosen.train_in_eval
        self.metric_batch, self.search_batch = chosen.metric_batch, chosen.search_batch
        self.preconditioner = as_preconditioner(chosen.preconditioner, self.solver)
        refuse_maximize(chosen.maximize, processes.size)
        named = named_parameters(self.model)
        record = BatchRecord(chosen_outputs(own_metric), named.values(), maximize=chosen.maximize)
        self._live = Live(named, record, processes, State(system=SystemMemory(self.damping.initial())))
        defaults = {"lr": lr, "weight_decay": chosen.weight_decay} | self.rule.options
        super().__init__(given_parameters(chosen.params, named), defaults)
        overhear(own_metric, record)
        if isinstance(self.model, nn.Module):
            hook = listen(self.model, record, in_eval=self.train_in_eval)
            self._live.finalizer = weakref.finalize(self, hook.remove)

    # what the user calls around a step

    @property
    def criterion(self) -> Criterion:
        """The loss that the metric belongs to."""
        criterion = getattr(self.metric, "criterion", None)
        if isinstance(criterion, Criterion):
            return criterion
        raise TypeError(f"{type(self.metric).__name__} has no criterion; compute your loss yourself")

    def observe(self, inputs: Any, targets: Any = None, *, floor: float = 0.0) -> None:
        """Take the next step's metric on these inputs instead of the gradient's: unlabelled data, another batch.

        On other data than the gradient's, part of the gradient lies outside the metric's range and the step grows like
        1 / damping; `state_report().outside` shows how large that part is. Pascanu & Bengio 2013, section 5, compare.

        Args:
            inputs: As the model takes them; copied. For `metrics` a dict by their names.
            targets: For metrics that use them. For `metrics` a dict by the names of those that do.
            floor: The least damping of this step, in units of G, however far an adaptive strategy has lowered it.

        Raises:
            ValueError: For a negative floor.
        """
        check_number("floor", floor)
        self._live.record.observed = Data(copy_tensors(inputs), copy_tensors(targets), None)
        self._live.record.floor = floor

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
        self._live.record.searched = Data(copy_tensors(inputs), copy_tensors(targets), None)

    @keep_gradient_mode
    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Closure | None = None, *, evidence: Callable[[], SystemEvidence] | None = None
    ) -> Tensor | None:
        """One step.

        Args:
            closure: Clears gradients, computes the loss, calls backward and returns the loss. As in LBFGS it may be
                called again, by rules and dampings that re-evaluate the loss, unless `loss()` made that unnecessary.
            evidence: For a field that knows its gradient and its system itself: what makes them, in place of a pass.

        Returns:
            The closure's first value, None without one.

        Raises:
            ValueError: If the loss was not computed as it should be; with `on_trouble="raise"` for a loss, a gradient
                or a metric that is not finite. Parameters and state are as before then.
        """
        if evidence is None:
            return super().step(closure)
        self._run(lambda called: self._take(self._choose(), evidence()))
        return None

    def _record_loss(self, outputs: Any, targets: Any, value: Tensor, chosen: bool) -> None:
        self._settle()
        rows = count_rows(self.criterion, outputs)
        weight = weigh_loss(self._live.processes, self.criterion, outputs, targets, value)
        self._live.record.record_loss(self.criterion, outputs, targets, value, rows, weight, chosen=chosen)
        self._live.record.computed[-1].ask_count()

    def _labels(self) -> torch.Generator | None:
        return getattr(self.metric, "generator", None)

    def _describer(self) -> Callable[[str, Tensor], tuple[str, int, int]]:
        total = sum(p.numel() for group in self.param_groups for p in group["params"])

        def describe(name: str, p: Tensor) -> tuple[str, int, int]:
            held = self.structure.count_numbers(p.numel(), total)
            held += sum(v.numel() for v in self._live.state.vectors.get(name, {}).values())
            kind = self.structure.kind_of(name, self._live.state.system.structure) if p.requires_grad else "frozen"
            return kind, p.numel(), held

        return describe

    def _rename(self, renamed: Mapping[str, str]) -> None:
        """Nothing is remembered of other coordinates than those of now."""
        state = self._live.state
        vectors = {name: part for name, part in state.vectors.items() if name not in renamed}
        self._live.state = replace(state, vectors=vectors, system=SystemMemory(state.system.level))
        super()._rename(renamed)

    # checkpoints

    def _by_parameter(self) -> dict[str, dict[str, Any]]:
        return {name: dict(vectors) for name, vectors in self._live.state.vectors.items()}

    def _fit(self, saved: Checkpoint) -> Callable[[], None]:
        vectors = {name: dict(saved.state[p]) for name, p in self._live.named.items() if p in saved.state}
        state = replace(State.load(saved.extra, None, None, self._live.named), vectors=vectors)
        own, order = list(self._live.named), list(saved.extra.get("order") or self._live.named)
        if order != own and (state.system.structure or state.system.preconditioner):
            name, came = next(pair for pair in zip_longest(own, order, fillvalue="no parameter") if pair[0] != pair[1])
            raise ValueError(
                f"state_dict has statistics of all parameters together, in an order in which {came!r} has the place of "
                f"this model's {name!r}: register its modules and parameters in the order of the model that was saved, "
                "and freeze those that were frozen there. Nothing was changed"
            )

        def restore() -> None:
            self._live.state, self._live.told = state, StepReport()
            generator = self._labels()
            if generator is not None and saved.labels is not None:
                generator.set_state(saved.labels)

        return restore

    def _move_memory(self, changed: Sequence[str]) -> None:
        live = self._live
        space, system = Space(live.named), live.state.system

        def follow(tree: Any, dtype: torch.dtype, device: torch.device) -> Any:
            return map_tensors(tree, lambda t: t.to(device, dtype if t.is_floating_point() else t.dtype))

        vectors = {
            name: follow(part, live.named[name].dtype, live.named[name].device) if name in changed else part
            for name, part in live.state.vectors.items()
        }
        memories = (follow(part, space.dtype, space.device) for part in (system.structure, system.preconditioner))
        live.state = replace(live.state, vectors=vectors, system=SystemMemory(system.level, *memories))

    # one step

    def _step(self, called: Called) -> None:
        self._follow_parameters()
        self._drop_silent()
        active = {id(p) for group in self.param_groups for p in group["params"]}
        gradients = read_gradients(self._live.processes, self._live.named, active - self._live.gone, self._live.record)
        if gradients is None:
            return
        params, space, gradient = gradients
        system = partial(self._system, params, gradient, 0.0)
        loss = join_mean_loss(self._live.processes, self._live.record, space.device)
        evidence = self.evidence(params, gradient, system, loss=loss, examples=self._count_examples)
        evidence = replace(evidence, complete=partial(self._complete, called))
        try:
            with self._replaying():
                self._take(self._choose(), evidence)
        except KeyError as error:
            left = sorted(self.model.keys() - params.keys()) if is_mapping(self.model) else []
            if error.args[0] not in left:
                raise
            raise ValueError(
                f"params {left} have no gradient, and the metric's function reads them: let the loss depend on all "
                "params, or build the optimizer without those that stay as they are"
            ) from error

    def _drop_silent(self) -> None:
        """Forget the losses in which no target counts on any process, where others are left: they tell nothing."""
        record, used = self._live.record, self._live.record.backward_losses
        if len(used) < 2:
            return
        rows = torch.tensor([float(loss.rows) for loss in used], device=next(iter(self._live.named.values())).device)
        silent = {loss for loss, n in zip(used, list_numbers(self._live.processes.sum(rows)), strict=True) if not n}
        if len(silent) < len(used):
            record.losses = [loss for loss in record.losses if loss not in silent]

    def _complete(self, called: Called, evidence: SystemEvidence) -> SystemEvidence:
        """The loss at trial points, and what is known of losses besides, for a batch that is fit for a step."""
        self._metric_data()  # what is missing there comes before what is missing for the loss
        params, space, gradient = dict(evidence.params), evidence.space, evidence.gradient
        joined, objective = self._find_objective(params, space, gradient, called)
        beside, outside = self._look_outside(params, space, gradient, joined)
        objective = beside if objective is joined else objective
        return replace(
            evidence,
            system=partial(self._system, params, gradient, max(outside.levels.values(), default=0.0)),
            objective=objective,
            trial=None if self._can_try(objective) else partial(self._find_trial, params, space, gradient),
            outside=outside,
        )

    def _system(self, params: dict[str, Tensor], gradient: Tensor, outside: float, state: State) -> MetricSystem:
        """The metric of this step's losses, over the examples of all processes."""
        record = self._live.record
        metric = metric_of_step(self.metric, record, self.model, params)
        metric = join_metric(self._live.processes, metric, record, self.metric_batch is not None, gradient.device)
        known, floor = (metric, params, gradient, self._metric_data(), state), record.floor
        return MetricSystem(self._choose_system(), *known, bound=lambda amount: max(amount, floor) + outside)

    def metric_system(
        self,
        params: Mapping[str, Tensor],
        gradient: Tensor,
        inputs: Any,
        targets: Any,
        state: State,
        operator: Operator | None = None,
    ) -> LinearSystem:
        """For `step(evidence=...)`: the system of this optimizer's metric on these examples.

        Args:
            params: The active parameters, by name.
            gradient: Of the mean loss, shape (n,).
            inputs: As the metric takes them.
            targets: For metrics that use them.
            state: Of the last step.
            operator: G over the examples of all processes, where it is known already.
        """
        alone = self._live.processes.size == 1 or operator is not None
        metric = self.metric if alone else JoinedMetric(self.metric, self._live.processes)
        known = (metric, params, gradient, Data(inputs, targets, None), state)
        return MetricSystem(self._choose_system(), *known, operator=operator)

    def _choose_system(self) -> SystemChoices:
        return SystemChoices(self.structure, self.solver, self.preconditioner, self.damping, self._live.processes)

    def _find_objective(
        self, params: dict[str, Tensor], space: Space, gradient: Tensor, called: Called
    ) -> tuple[Objective | None, Objective | None]:
        """The loss at other parameters, where it can be had: as `opt.loss` was told, and as the step is judged by."""
        needed = self.rule.needs_loss or self._choose().is_judged(self._live.state)
        # without trial points the loss of the pass is known already
        searched = self._live.record.search_data(self.search_batch, self._live.state.step) if needed else None
        data = (self._live.record, params, space, called, searched, needed)
        own = objective_of(self.model, lambda: self.criterion, *data)
        joined = join_objective(self._live.processes, own, self._live.record)
        if own is None or searched is not None or called.closure is None:
            return joined, joined
        heeded = self._heed_closure(own, gradient, called)
        return joined, joined if heeded is own else join_objective(self._live.processes, heeded, self._live.record)

    def _heed_closure(self, objective: Objective, gradient: Tensor, called: Called) -> Objective:
        """What the closure returned is judged, where the losses of `opt.loss` are not all of it.

        They may be: of micro-batches a closure may return the last one's loss alone.
        """
        differs = tells_another(called, objective, self._live.record)
        if self._live.processes.size > 1:
            differs = bool(self._live.processes.sum(torch.tensor(float(differs), device=gradient.device)) > 0)
        if not differs or called.closure is None or called.value is None or called.random is None:
            return objective
        if self._live.processes.size == 1 and self._can_try(objective):
            own = objective.gradient(torch.zeros_like(gradient))[1]
            if float(measure_norm(gradient - own)) <= UNKNOWN_SHARE * float(measure_norm(gradient)):
                return objective
        known = (objective.params, objective.space, called.value, called.random)
        return Reclose(self.model, called.closure, self._live.record, *known)

    def _can_try(self, objective: Objective | None) -> bool:
        """Whether the loss can be evaluated at other parameters."""
        if objective is None:
            return False
        replayed = not isinstance(getattr(objective, "part", objective), Reclose)
        return not (replayed and any(loss.problem for loss in self._live.record.used_losses()))

    def _look_outside(
        self, params: dict[str, Tensor], space: Space, gradient: Tensor, objective: Objective | None
    ) -> tuple[Objective | None, OutsideLosses]:
        """The loss with what another one adds to the gradient, and what is known of that one.

        A loss that `opt.loss` was not told of is judged by its slope and curvature, and damps the step besides.
        """
        before, record = self._live.state.outside, self._live.record
        replaced = record.searched is not None or self.search_batch is not None or record.is_stale
        if objective is None or replaced or not record.backward_losses or not self._can_try(objective):
            return objective, before
        if any(passed.is_behind() for loss in record.backward_losses for passed in loss.passes):
            return objective, before  # another optimizer's step came between
        if isinstance(getattr(objective, "part", objective), Reclose):
            return objective, before
        if not before.asks:
            return objective, replace(before, updates=before.updates + 1)

        def doubt() -> None:
            """Multiply once: what keeps the loss apart from the parameters is refused there."""
            _ = self._system(params, gradient, 0.0, self._live.state).operator @ gradient

        own = OwnGradients()
        slope = objective.gradient(space.zeros())[1]
        own.add(space.unflatten(slope), torch.ones((), dtype=slope.dtype, device=slope.device))
        after = before.measure(own, space.unflatten(gradient), params, [list(params)], 1, 1.0, Processes(), doubt)
        if not after.levels:
            return objective, after
        rest = space.flatten({name: after.last[name][1] for name in params})
        return Beside(objective, rest, max(after.levels.values())), after

    def _find_trial(self, params: dict[str, Tensor], space: Space, gradient: Tensor) -> Proximal | None:
        """What stands for a loss that cannot be evaluated: the gradient and the KL of the outputs."""
        if self._live.processes.size > 1 or self._live.record.observed is not None:
            return None
        metric = metric_of_step(self.metric, self._live.record, self.model, params)
        return proximal_of(metric, self._metric_data(), params, space, gradient)

    @contextmanager
    def _replaying(self) -> Generator[None]:
        """Modules in the mode of the remembered pass; after an error the metric's generator goes back."""
        last, generator, state = self._live.record.find_pass(), self._labels(), self._live.state
        before = None if generator is None else generator.get_state()
        modes = last.modes_of(self.model) if last and isinstance(self.model, nn.Module) else nullcontext()
        try:
            with modes:
                yield
        except BaseException:
            if generator is not None and before is not None and self._live.state is state:  # the step was not taken
                generator.set_state(before)
            raise

    def _metric_data(self) -> Data:
        return self._live.record.metric_data(self.metric_batch, self._live.state.step)

    def _count_examples(self) -> int:
        return as_call(self._metric_data().inputs).batch()

    # the step of any evidence

    def _settle(self) -> None:
        kind, alike = type(self.metric).__name__, getattr(self.metric, "alike", ())
        rest = {name: getattr(self, name) for name in ("warm_start", "train_in_eval", "on_trouble")}
        rest["search_batch"] = "none" if self.search_batch is None else "a number of each process's own"
        settings = self.solver, self.damping, self.rule, self.preconditioner, kind, *alike, rest
        self._live.processes.settle(self.model, self._live.named, self.structure, settings)
        refuse_maximize(self._live.record.maximize, self._live.processes.size)

    def _choose(self) -> Choices:
        absolute = getattr(self.solver, "absolute", False)
        known = (self.rule, self.damping, self._live.processes, is_bounded(self.metric), self.damping.every or 1)
        return Choices(*known, warm_start=self.warm_start, absolute=absolute)

    def evidence(
        self,
        params: Mapping[str, Tensor],
        gradient: Tensor,
        system: Callable[[State], LinearSystem],
        *,
        loss: Tensor | None = None,
        objective: Objective | None = None,
        examples: Callable[[], int] = int,
        attempts: int = 1,
    ) -> SystemEvidence:
        """For `step(evidence=...)`: what a batch told, with the numbers of the parameter groups.

        Args:
            params: The active parameters, by name.
            gradient: Of the mean loss, shape (n,).
            system: The state of the last step -> what is to be solved.
            loss: The mean loss, NaN where no target counts; None where it is not known.
            objective: The loss at trial points; None where it cannot be had.
            examples: Counts the batch's, on this process.
            attempts: How often the system is solved, each time with more damping, until the rule takes its solution.
        """
        groups = {name: group for name, _, group in self._by_group()}
        rates, decays = ({n: float(group[key]) for n, group in groups.items()} for key in ("lr", "weight_decay"))
        known = (rates, decays, self._options(), loss, objective, examples, attempts)
        return SystemEvidence(params, gradient, system, *known)
