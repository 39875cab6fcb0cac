"""The natural gradient layer by layer, as a drop-in `torch.optim.Optimizer`: K-FAC and its family."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from natgrad.families import Criterion, Likelihood, as_criterion
from natgrad.optim.blocks import Block, Blocks
from natgrad.optim.door import check_number, named_parameters
from natgrad.optim.reading import Reader
from natgrad.optim.recall import Recall, listen
from natgrad.optim.reports import Report, Row, StateReport
from natgrad.pure import full_precision, leaves, map_tensors
from natgrad.structures import Layerwise

Closure = Callable[[], Tensor]
EXTRA = "natgrad"
LIMITS = {"lr": math.inf, "momentum": 1.0, "damping": math.inf, "max_kl": math.inf, "kl_share": math.inf}
LIMITS["weight_decay"] = math.inf
RAMP = 10  # steps after which the intervals between updates grow by one


class StructuredNaturalGradient(Optimizer):
    """theta <- theta - lr (G + damping I)^-1 m, G in one block per layer, m the running mean of the gradient.

    model: an `nn.Module`.   criterion: its loss from `torch.nn`, or an `ng` likelihood.   structure: which block per
    layer (`ng.Kronecker(decay=.95)`, ...); its estimate says how labels are drawn.   lr: learning rate.   momentum:
    decay of the gradient's running mean (bias-corrected), taken before the metric, so that the whole step is in
    today's metric.   damping: lambda in units of the mean eigenvalue of the block, which frees it of all scales.
    max_kl: a step moves at most this many nats per example in the quadratic model.   kl_share: nor more than this
    share of the loss, while that is positive: where little is left to gain, little is risked.   weight_decay:
    decoupled, theta <- (1 - lr * weight_decay) theta.   update_every, invert_every: steps between updates of the
    statistics and of the inverses, at most: both are made at every step in the first ten, and one step later after
    each ten more.   params: parameter groups; all from lr to weight_decay are group keys, max_kl and kl_share the
    least over the groups.

    Loop: `opt.zero_grad(); loss = opt.loss(model(x), y); loss.backward(); opt.step()`. On update steps `opt.loss` also
    goes backward from sampled labels, to the layers only: `.grad`, buffers and the global random state are untouched.
    A gradient that is not finite skips the step, statistics that are not finite are not taken, an inverse that fails
    leaves its last good one in place; all are counted in `state_report().failures`.
    """

    def __init__(
        self,
        model: nn.Module,
        criterion: nn.Module | Likelihood | Criterion,
        structure: Layerwise,
        lr: float = 1.0,
        *,
        momentum: float = 0.0,
        damping: float = 0.1,
        max_kl: float = 0.3,
        kl_share: float = 0.01,
        weight_decay: float = 0.0,
        update_every: int = 10,
        invert_every: int = 10,
        params: Iterable[Tensor] | Iterable[dict[str, Any]] | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}, expected a torch.nn.Module: its layers are the blocks")
        if not isinstance(structure, Layerwise):
            raise TypeError(f"structure is {structure!r}, expected one in blocks per layer such as ng.Kronecker(0.95)")
        for name, every in (("update_every", update_every), ("invert_every", invert_every)):
            if not isinstance(every, int) or every < 1:
                raise ValueError(f"{name} is {every}, expected an integer >= 1")
        self.model, self.criterion, self.structure = model, as_criterion(criterion), structure
        self.update_every, self.invert_every = update_every, invert_every
        self._named = named_parameters(model)
        self._recall = Recall()
        self._reader = Reader(model, self._named, structure.estimate, structure.seed)
        defaults = {"lr": lr, "momentum": momentum, "damping": damping, "max_kl": max_kl, "kl_share": kl_share}
        super().__init__(
            list(self._named.values()) if params is None else params, {**defaults, "weight_decay": weight_decay}
        )
        self._blocks = Blocks(structure, self._named, self.state)
        self._told: dict[str, Tensor] = {}
        self._clock = {"step": 0, "updated": -1, "inverted": -1, "failures": 0}
        self._pending = 0  # readings since the last step
        self._nats = 1.0
        self._losses: list[tuple[Any, int]] = []  # of this step's micro-batches, each with its number of rows
        self._reader.taps.armed = True
        self._finalizer = weakref.finalize(self, release, self._reader, listen(model, self._recall, traceable=True))

    # what the user calls around a step

    def loss(self, outputs: Any, targets: Any) -> Tensor:
        """The criterion's value, for you to call `.backward()` on; on update steps it reads the statistics first.

        In evaluation mode or under `torch.no_grad()` it is the value alone. ValueError for targets that the
        criterion's likelihood cannot produce.
        """
        value = self.criterion.value(outputs, targets)
        if self.model.training and torch.is_grad_enabled():
            self._recall.record_loss(self.criterion, outputs, targets, value)
            self._nats = self.criterion.nats(outputs)
            self._losses.append((self._recall.loss, count_rows(self.criterion, outputs)))
            if self._reader.taps.armed:
                self._read(outputs, targets, value)
        return value

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Tensor | None:  # type: ignore[override]
        """One step; returns the closure's value. closure: clears gradients, computes `opt.loss`, calls backward.

        ValueError if no statistics were ever read: the loss was not computed with `opt.loss`.
        """
        value = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    value = closure()
            self._step()
        finally:
            self._recall.clear()
            self._losses.clear()
            self._reader.taps.take()
        return value

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and with them the count of what they are a sum of."""
        super().zero_grad(set_to_none)
        self._recall.scale = 0.0

    def report(self) -> Report:
        """What each parameter gets: structure, entries, and numbers remembered between steps."""
        held = {name: block for block in self._blocks for name in block.layout.names}
        rows = Report()
        for name, p in self._by_group():
            numbers = sum(t.numel() for t in leaves(self.state.get(p, {})))
            rows.append(Row(name, self._kind(held.get(name)), p.numel(), numbers))
        return rows

    def state_report(self) -> StateReport:
        """How the last step went: KL moved, share of the full step taken, the gradient's norm, failures so far."""
        told = {key: float(value) for key, value in self._told.items()}
        status = "stepped" if "kl" in told else "skipped" if self._clock["step"] else "no step yet"
        return StateReport(
            step=self._clock["step"],
            loss=told.get("loss", math.nan),
            kl=told.get("kl", math.nan),
            status=status,
            rate=told.get("rate", 0.0 if self._clock["step"] else math.nan),
            gradient=told.get("gradient", math.nan),
            failures=self._clock["failures"],
        )

    def detach(self) -> None:
        """Take the hooks off the model. Also happens when the optimizer dies."""
        self._finalizer()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters (unfrozen, created later). ValueError for parameters of another model or a bad number."""
        given = param_group["params"]
        group = {**param_group, "params": [given] if isinstance(given, Tensor) else list(given)}
        known = {id(p): name for name, p in self.model.named_parameters()}
        strangers = [tuple(p.shape) for p in group["params"] if id(p) not in known]
        if strangers:
            raise ValueError(f"params holds tensors of shapes {strangers} that are not parameters of the model")
        for key, most in LIMITS.items():
            check_key(key, group.get(key, self.defaults[key]), most)
        super().add_param_group(group)
        fresh = {known[id(p)]: p for p in group["params"] if known[id(p)] not in self._named and p.requires_grad}
        if fresh:
            self._named.update(fresh)
            self._reader.detach()
            self._reader.attach(self._named)
            self._reader.taps.armed = True

    # checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on; `torch.load(weights_only=True)` reads it.

        Per parameter: the gradient's mean, and, under a block's first parameter, its statistics and its inverse.
        """
        generator = self._reader.generator
        extra = {
            "clock": dict(self._clock),
            "blocks": self._blocks.saved(),
            "trusted": None if self._reader.trusted is None else sorted(self._reader.trusted),
            "open": sorted(self._reader.open),
            "generator": None if generator is None else generator.get_state(),
        }
        return {**super().state_dict(), EXTRA: extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`. ValueError if it belongs to another kind of optimizer."""
        extra = state_dict.get(EXTRA, {})
        if "clock" not in extra:
            raise ValueError(
                f"state_dict has no {EXTRA!r} entry of a structured optimizer: it was not saved by ng.kfac or its like"
            )
        super().load_state_dict({"param_groups": state_dict["param_groups"], "state": {}})
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        ours = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, ours, strict=True):
            if i in state_dict["state"]:  # in its own dtype: the statistics of half-precision parameters are float32
                self.state[p] = map_tensors(state_dict["state"][i], lambda t, p=p: t.to(p.device).clone())
        self._clock = dict(extra["clock"])
        self._reader.trusted = None if extra["trusted"] is None else set(extra["trusted"])
        self._reader.open = set(extra.get("open", ()))
        self._blocks.state = self.state
        self._blocks.rebuild(extra["blocks"], self._reader.by_names())
        if extra["generator"] is not None:
            self._reader.generator_on(ours[0].device).set_state(extra["generator"].cpu())
        self._reader.taps.armed = self._due("updated", self.update_every)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError(
            "this optimizer belongs to its model and is not copied: build a new one on the copied model and load "
            "optimizer.state_dict() into it"
        )

    def __reduce__(self) -> NoReturn:
        raise TypeError("this optimizer is not pickled: save optimizer.state_dict()")

    # one step

    def _read(self, outputs: Any, targets: Any, value: Tensor) -> None:
        decay = 1.0 if self._pending else self.structure.decay  # micro-batches of one step count alike
        taken = False
        if bool(torch.isfinite(value.detach()).all()):
            with full_precision(self._named):  # users call this under autocast, which would round second moments
                reading = self._reader.read(self.criterion, outputs, targets, self._recall)
                taken = self._blocks.take(reading, decay)
        else:
            self._reader.skip(value)
        self._reader.taps.take()
        self._pending += taken
        self._clock["failures"] += not taken
        if taken:
            self._clock["updated"] = self._clock["step"]

    def _step(self) -> None:
        active = [(name, p) for name, p in self._by_group() if p.grad is not None]
        if not active:
            return
        gradients = {name: dense(p) / (self._recall.scale or 1.0) for name, p in active}
        norm = torch.stack([torch.linalg.vector_norm(g) for g in gradients.values()]).square().sum().sqrt()
        finite = bool(torch.isfinite(norm))  # the one synchronisation of a step between updates
        if finite and not self._blocks.all:
            raise ValueError(
                "no statistics yet: compute the loss with optimizer.loss(outputs, targets), in training mode, and call "
                "backward() on it"
            )
        self._told = {"gradient": norm} | ({"loss": weighted_mean(self._losses)} if self._losses else {})
        if finite:
            self._invert()
            self._move(gradients)
        else:
            self._clock["failures"] += 1
        self._pending = 0
        self._clock["step"] += 1
        self._reader.taps.armed = self._due("updated", self.update_every)

    def _invert(self) -> None:
        if self._clock["updated"] <= self._clock["inverted"] or not self._due("inverted", self.invert_every):
            return
        groups = self._groups()
        self._clock["failures"] += self._blocks.invert(lambda name: float(groups[name]["damping"]))
        self._clock["inverted"] = self._clock["step"]

    def _move(self, gradients: dict[str, Tensor]) -> None:
        groups, steps, moved = self._groups(), dict[str, Tensor](), []
        rates = {name: float(group["lr"]) for name, group in groups.items()}
        means = {name: self._mean(self._named[name], g, groups[name]["momentum"]) for name, g in gradients.items()}
        for block in self._blocks:
            if block.inverse is not None and any(name in means for name in block.layout.names):
                found, image = self._blocks.direction(block, means, rates)
                steps |= found
                moved.append(image)
        if not steps:
            return
        kl = 0.5 * self._nats * torch.stack(moved).sum()
        rate = (self._radius(kl) / kl).sqrt().clamp(max=1.0)  # no step at all: infinite, and so 1
        for name, step in steps.items():
            p = self._named[name]
            if groups[name]["weight_decay"]:
                p.mul_(1 - rates[name] * groups[name]["weight_decay"])
            p.addcmul_(step.to(p.dtype), rate.to(p.dtype), value=-rates[name])
        self._told |= {"kl": kl * rate.square(), "rate": rate}

    def _radius(self, like: Tensor) -> Tensor:
        """The bound on this step's KL, in nats per example."""
        radius = torch.full_like(like, min(float(group["max_kl"]) for group in self.param_groups))
        if "loss" not in self._told:
            return radius
        share = min(float(group["kl_share"]) for group in self.param_groups)
        bound = share * self._nats * self._told["loss"].to(like)
        return torch.where(bound > 0, torch.minimum(radius, bound), radius)

    def _mean(self, p: Tensor, gradient: Tensor, decay: float) -> Tensor:
        """The gradient's running mean, corrected for its start."""
        if decay == 0:
            return gradient
        state = self.state[p]
        state["count"] = state.get("count", 0) + 1
        state["mean"] = torch.lerp(state["mean"], gradient, 1 - decay) if "mean" in state else (1 - decay) * gradient
        return state["mean"] / (1 - decay ** state["count"])

    def _due(self, event: str, every: int) -> bool:
        step = self._clock["step"]
        return step - self._clock[event] >= min(every, 1 + step // RAMP)

    def _by_group(self) -> Iterator[tuple[str, Tensor]]:
        names = {id(p): name for name, p in self._named.items()}
        return ((names[id(p)], p) for group in self.param_groups for p in group["params"] if id(p) in names)

    def _groups(self) -> dict[str, dict[str, Any]]:
        by_id = {id(p): group for group in self.param_groups for p in group["params"]}
        return {name: by_id[id(p)] for name, p in self._named.items() if id(p) in by_id}

    def _kind(self, block: Block | None) -> str:
        if block is None:
            return "not read yet"
        return "Diagonal" if block.layer is None else type(self.structure).__name__


def dense(p: Tensor) -> Tensor:
    """p.grad, dense, at least in float32."""
    assert p.grad is not None
    gradient = p.grad.to_dense() if p.grad.is_sparse else p.grad
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32))


def count_rows(criterion: Criterion, outputs: Any) -> int:
    """Rows of outputs: what a micro-batch weighs."""
    return len(criterion.family.rows(map_tensors(outputs, torch.detach)))


def weighted_mean(losses: list[tuple[Any, int]]) -> Tensor:
    """The micro-batches' losses as one mean."""
    return torch.stack([loss * rows for loss, rows in losses]).sum() / sum(rows for _, rows in losses)


def check_key(key: str, value: float, most: float) -> None:
    """ValueError or TypeError unless a group key is a number in its range: momentum below 1, a bound above 0."""
    check_number(key, value, most)
    if key == "momentum" and value == 1:
        raise ValueError("momentum is 1, expected less than 1: a running mean that forgets nothing takes nothing in")
    if key in ("damping", "max_kl", "kl_share") and value == 0:
        raise ValueError(f"{key} is 0, expected a number > 0" + ("" if key == "damping" else "; math.inf for no bound"))


def release(reader: Reader, listener: Any) -> None:
    """Take all hooks off the model."""
    reader.detach()
    listener.remove()
