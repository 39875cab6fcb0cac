"""Whatever takes steps takes `group=`: the processes of torch.distributed that train one thing together."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import natgrad as ng

MADE = {
    "Variational": "made by variational, which takes it",
    "LowRankVariational": "made by variational_low_rank, which takes it",
    "VariationalMixture": "made by variational_mixture, which takes it",
    "StochasticReconfiguration": "made by stochastic_reconfiguration, which takes it",
    "ResidualOptimizer": "made by residuals, which takes it",
    "PolicyLearner": "the base of TRPO and NaturalPolicyGradient, which take it",
    "acktr": "hands its keywords to NaturalPolicyGradient",
    "GroundState": "steps by the StochasticReconfiguration that it is given",
}


def list_public() -> Iterator[tuple[str, Any]]:
    """Every public name of every folder, with what it is."""
    names = [one.name for one in pkgutil.walk_packages(ng.__path__, "natgrad.") if one.ispkg]
    for name in ["natgrad", *names]:
        folder = importlib.import_module(name)
        for key in getattr(folder, "__all__", ()):
            yield key, getattr(folder, key)


def is_trainer(thing: Any) -> bool:
    """True for a class of objects that take steps and are saved."""
    steps = [getattr(thing, name, None) for name in ("step", "learn", "run")]
    return inspect.isclass(thing) and any(map(inspect.isfunction, steps)) and hasattr(thing, "state_dict")


def list_keywords(call: Callable[..., Any]) -> set[str]:
    """The arguments that a class or a function takes by name, those of its `**settings: Unpack[...]` too."""
    found = set(inspect.signature(call).parameters)
    hints = get_type_hints(call.__init__ if inspect.isclass(call) else call)
    for hint in hints.values():
        for options in get_args(hint):
            found |= set(getattr(options, "__annotations__", ())) if hasattr(options, "__total__") else set()
    return found


def makes_trainer(thing: Any, trainers: set[str]) -> bool:
    """True for a function that returns an object that takes steps."""
    return inspect.isfunction(thing) and str(inspect.signature(thing).return_annotation) in trainers


def test_everything_that_takes_steps_takes_a_group():
    public = dict(list_public())
    trainers = {name for name, thing in public.items() if is_trainer(thing)}
    recipes = {name for name, thing in public.items() if makes_trainer(thing, trainers | set(MADE))}
    assert "NaturalGradient" in trainers
    assert "kfac" in recipes
    lacking = {name for name in trainers | recipes if "group" not in list_keywords(public[name])}
    assert lacking == set(MADE), lacking
