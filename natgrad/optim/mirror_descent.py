"""Mirror descent as a torch optimizer: gradient steps in the dual of a potential."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from natgrad.geometry import Potential, Region, SquaredNorm, check_potential
from natgrad.ground.checks import check_number
from natgrad.ground.linalg import all_finite
from natgrad.ground.pure import keep_gradient_mode
from natgrad.ground.typed_torch import list_numbers
from natgrad.optim.checkpoint import as_plain
from natgrad.optim.checks import to_dense
from natgrad.optim.guard import Accidents, OnTrouble
from natgrad.optim.processes import Processes, check_group, meet

CHOICES = ("potential", "projection")
"""What a group has that a checkpoint names and does not hold."""


class MirrorDescent(Optimizer):
    """w' = (grad phi)^-1 (grad phi(w) - lr g) for a potential phi, then the nearest point of a region.

    The step minimises <g, w'> + D(w', w) / lr over the region, D the Bregman divergence of phi. `SquaredNorm()` is
    gradient descent, `NegativeEntropy()` exponentiated gradient, `PNorm(p)` is for few large weights, and
    `LogPartition(family)` is the natural gradient in a family's expectation parameters. Momentum is that of torch's
    SGD, in the dual.

    Args:
        params: Parameters, or groups of them, as in `torch.optim`; groups may have a `potential`, a `projection`, `lr`,
            `momentum` of their own.
        potential: phi, of `natgrad.geometry`.
        lr: The step length.
        projection: The region that steps end in: `ng.geometry.Box(low, high)`, `Ball(radius)` or
            `ProbabilitySimplex(dim)`. None: all of the potential's domain.
        momentum: Share of the last step's change that is added to the next one.
        maximize: Climb instead.
        group: The processes of `torch.distributed` that train these parameters together. All call `step`, which takes
            the mean of their gradients, a missing one counted as zero; where a `DistributedDataParallel` averages them,
            it is not needed.
        on_trouble: "skip" leaves out a step with a gradient or a result that is not finite, warns at the fifth in a row
            and raises RuntimeError at the 25th. "raise" raises ValueError for it. Nothing is changed in either case.

    Attributes:
        accidents: The steps that were left out: `accidents.count` in all.

    Example:
        >>> costs, weights = torch.tensor([1.0, 0.5, 2.0]), torch.full((3,), 1 / 3, requires_grad=True)
        >>> simplex = ng.geometry.ProbabilitySimplex()
        >>> opt = ng.MirrorDescent([weights], ng.geometry.NegativeEntropy(), lr=1.0, projection=simplex)
        >>> for _ in range(20):
        ...     opt.zero_grad()
        ...     (costs @ weights).backward()
        ...     _ = opt.step()
        >>> weights.detach()  # multiplicative weights: exp(-20 cost), normalised
        tensor([    0.0000,     1.0000,     0.0000])
    """

    def __init__(
        self,
        params: Iterable[Any],
        potential: Potential | None = None,
        lr: float = 0.1,
        *,
        projection: Region | None = None,
        momentum: float = 0.0,
        maximize: bool = False,
        group: Any = None,
        on_trouble: OnTrouble = "skip",
    ) -> None:
        self.accidents = Accidents(on_trouble)
        self._group = None if group is None else check_group(group)
        self._ranks, self._compared = Processes(), 0
        potential = SquaredNorm() if potential is None else potential
        choices = {"potential": potential, "projection": projection}
        super().__init__(params, {**choices, "lr": lr, "momentum": momentum, "maximize": maximize})

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles hold: torch's part, and this class's own."""
        own = ("accidents", "_group", "_ranks", "_compared")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more group, checked: numbers, choices, and that its parameters are in the potential's domain.

        Args:
            param_group: As in `torch.optim`.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        check_number("lr", group["lr"])
        check_number("momentum", group["momentum"], most=1.0)
        potential, projection = group["potential"], group["projection"]
        check_potential(potential, projection)
        for place, p in enumerate(group["params"]):
            name = f"parameter {place} of group {len(self.param_groups) - 1}"
            if not p.is_floating_point():
                raise TypeError(f"{name} is {p.dtype}, expected floating-point numbers")
            potential.check(p, name)
            if projection is not None:
                potential.project(p.detach(), projection)  # an error for a region that the potential does not know

    @keep_gradient_mode
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step.

        Args:
            closure: Clears gradients, computes the loss, calls backward and returns the loss.

        Returns:
            The closure's value, None without one.

        Raises:
            ValueError: For a gradient or a result that is not finite, with `on_trouble="raise"`.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        try:
            moves = [self._move(group, p, gradient) for group, p, gradient in self._read_gradients()]
        except ValueError as error:
            self.accidents.meet(str(error))
            return value
        for p, target, momentum in moves:
            p.copy_(target)
            if momentum is not None:
                self.state[p]["momentum"] = momentum
        self.accidents.meet(None)
        return value

    def _read_gradients(self) -> list[tuple[dict[str, Any], Tensor, Tensor]]:
        """The parameters that have a gradient on some process, their groups before and their gradients after them."""
        held = [(group, p) for group in self.param_groups for p in group["params"]]
        gradients = {i: to_dense(p.grad) for i, (_, p) in enumerate(held) if p.grad is not None}
        if self._group is not None and held:
            gradients = self._average([p for _, p in held], gradients)
        return [(*held[i], gradient) for i, gradient in gradients.items()]

    def _average(self, params: Sequence[Tensor], own: dict[int, Tensor]) -> dict[int, Tensor]:
        """The mean gradients over the processes by place. ValueError on all that hold other parameters, once."""
        if self._compared != len(params):
            named = {str(i): p for i, p in enumerate(params)}
            self._ranks = meet(named, self._group)[1]
            self._ranks.compare(named, repr([group["potential"] for group in self.param_groups]))
            self._compared = len(params)
        if self._ranks.size == 1 or self._ranks.wrappers:
            return own
        there = torch.tensor([float(i in own) for i in range(len(params))], device=params[0].device)
        places = [i for i, flag in enumerate(list_numbers(self._ranks.sum(there))) if flag]
        parts = {str(i): own[i] if i in own else torch.zeros_like(params[i]) for i in places}
        means = self._ranks.average(parts)
        return {i: means[str(i)] for i in places}

    def _move(self, group: dict[str, Any], p: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """A parameter, where it goes, and its new momentum. ValueError where that is not finite."""
        change, momentum = -gradient if group["maximize"] else gradient, None
        if group["momentum"]:
            last = self.state[p].get("momentum") if p in self.state else None
            momentum = change.clone() if last is None else group["momentum"] * last + change
            change = momentum
        if not all_finite(change):
            raise ValueError("a gradient is not finite")
        target = group["potential"].step(p.detach(), group["lr"] * change, group["projection"])
        if not all_finite(target):
            raise ValueError(f"a step of {group['potential']!r} is not finite: lower lr = {group['lr']}")
        return p, target, momentum

    def state_dict(self) -> dict[str, Any]:
        """As in `torch.optim`; potentials and regions by their names alone, so that `weights_only=True` reads it."""
        state = super().state_dict()
        groups = [as_plain(group) | {name: repr(group[name]) for name in CHOICES} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in `torch.optim`.

        Args:
            state_dict: What `state_dict` gave.

        Raises:
            ValueError: Where potentials or regions are not those of this optimizer.
        """
        saved = state_dict["param_groups"]
        if len(saved) != len(self.param_groups):
            raise ValueError(f"state_dict has {len(saved)} groups, expected {len(self.param_groups)}")
        for old, own in zip(saved, self.param_groups, strict=True):
            for name in CHOICES:
                if name not in old:
                    raise ValueError(f"state_dict has no {name!r} in its groups: it was not saved by ng.MirrorDescent")
                if old[name] != repr(own[name]):
                    raise ValueError(
                        f"state_dict was written with {name} {old[name]}, this optimizer has {own[name]!r}"
                    )
        choices = [{name: own[name] for name in CHOICES} for own in self.param_groups]
        # what a scheduler or a trainer added stays where the state has none of it
        groups = [{**own, **old, **choice} for own, old, choice in zip(self.param_groups, saved, choices, strict=True)]
        super().load_state_dict({**state_dict, "param_groups": groups})
