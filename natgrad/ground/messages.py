"""What is shown and said: tables, near names, calls as other packages have them."""

from __future__ import annotations

import inspect
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from html import escape
from importlib import import_module
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

P = ParamSpec("P")
R = TypeVar("R")


def write_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """An HTML table, as notebooks show it."""
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


class Columns(dict[str, list[Any]]):
    """Lists of equal length by name, with one entry per update or generation: `len(history)` counts the entries.

    Args:
        names: Of the lists; the first has an entry for each.
        entries: What an entry is of, for the representation.
    """

    def __init__(self, names: Iterable[str], entries: str) -> None:
        super().__init__((name, []) for name in names)
        self.entries = entries

    def __missing__(self, name: str) -> list[Any]:
        raise KeyError(f"{name!r} is no list of this history, expected one of {', '.join(self)}")

    def __len__(self) -> int:
        return len(next(iter(self.values())))

    def __repr__(self) -> str:
        return f"History of {len(self)} {self.entries}: {', '.join(self)}"

    def _repr_html_(self) -> str:
        last = range(max(0, len(self) - 10), len(self))
        return write_table(self.names, ([show_cell(self[name][i]) for name in self.names] for i in last))

    @property
    def names(self) -> list[str]:
        """The names of the lists."""
        return list(self)

    def state_dict(self) -> dict[str, list[Any]]:
        """The lists, for a checkpoint."""
        return {name: list(column) for name, column in self.items()}

    def load_state_dict(self, state: dict[str, list[Any]]) -> None:
        """Go on from a checkpoint.

        Args:
            state: What `state_dict` returned.
        """
        self.clear()
        self.update((name, list(column)) for name, column in state.items())


def write_choices(thing: Any, **choices: Any) -> str:
    """`Name(a=1, b=2)`."""
    words = ", ".join(f"{name}={show_choice(value)}" for name, value in choices.items() if value is not None)
    return f"{type(thing).__name__}({words})"


def show_choice(value: Any) -> str:
    """A module by its class, a function by its name, a generator by its device, a number in four digits."""
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, FunctionType):
        return value.__name__
    if isinstance(value, torch.Generator):
        return f"Generator({value.device})"
    return show_cell(value)


def show_cell(value: Any) -> str:
    """A number in four digits, a dash for what there is not."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_shape(value: Any) -> str:
    """The shape of a tensor, the type of anything else."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def show_dtype(value: Any) -> str:
    """The dtype of a tensor, the type of anything else."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


# What to say of a name that natgrad does not have: `ng.KFAC` is `ng.kfac`, `ng.Nystrom` is `ng.solvers.Nystrom`

ELSEWHERE = {
    "natgrad.kfac": "KFACOptimizer KFACPreconditioner KFACLinearOperator Shampoo SOAP",
    "natgrad.NaturalGradient": "NGD NaturalGradientDescent NaturalGrad NaturalGradientOptimizer",
    "natgrad.fisher": "FIM fisher_matrix fisher_information FisherMetric fisher_information_matrix",
    "natgrad.sampled_fisher": "FisherMCLinearOperator",
    "natgrad.empirical_fisher": "EFLinearOperator ef",
    "natgrad.gauss_newton": "GGN GGNLinearOperator",
    "natgrad.hessian": "hvp HessianLinearOperator",
    "natgrad.minimize": "fmin fmin2 cma CMA CMAES CMAEvolutionStrategy NES SNES xNES",
    "natgrad.stochastic_reconfiguration": "SR QGT QGTOnTheFly QGTJacobianDense MinSR",
    "natgrad.vmc": "MCState VMC",
    "natgrad.variational": "SVI Trace_ELBO ELBO advi NaturalVariational VariationalDistribution",
    "natgrad.residuals": "PINN ENGD",
    "natgrad.TRPO": "PPO A2C SAC DQN",
    "agent.evaluate(env, episodes)": "evaluate_policy",
    "learn(steps, callback=f) with a function f of the agent": "CheckpointCallback BaseCallback CallbackList",
    "natgrad.rules.SpectralDescent": "Muon",
    "natgrad.LevenbergMarquardt": "LM",
}
"""Names of other packages, by what takes their place here."""

OF_TOLERANCES = "write tolerances=ng.search.Tolerances(tolx=..., tolfun=..., maxiter=...)"
SEARCHES = {
    "options": "write its entries as arguments, ftarget=1e-8",
    "inopts": "write its entries as arguments, seed=1",
    **dict.fromkeys(("tolfun", "tolx", "tol", "maxiter"), OF_TOLERANCES),
    "CMA_stds": "write sigma0=, one number for each variable",
    "CMA_diagonal": "write model=ng.search.Separable()",
    "integer_variables": "write integers=",
    "fixed_variables": "leave them out of x0, and let f put them in",
}
"""Arguments of pycma's and SciPy's, and what stands for them in a search."""

ARGUMENTS = {
    "EvalCallback": {
        "log_path": "callback.history has every evaluation",
        "verbose": "learn(progress=True) shows how far it is",
        "render": "make the environment with render_mode='human'",
        "warn": "there is nothing to switch off",
        "callback_after_eval": "give learn a list of callbacks",
    },
    "make_vec_env": {
        "monitor_dir": "agent.history has the returns of every batch",
        "monitor_kwargs": "agent.history has the returns of every batch",
        "vec_env_cls": "it returns a list of environments, as an agent takes them",
        "vec_env_kwargs": "it returns a list of environments, as an agent takes them",
        "start_index": "the agent seeds its environments one after the other",
    },
    "stochastic_reconfiguration": {
        "diag_shift": "write damping=",
        "learning_rate": "write lr=",
        "variational_state": "write psi=, an ng.LogAmplitude",
    },
    "residuals": {
        "loss_weights": "write weights=, by the names of the terms",
        "external_trainable_variables": "make them unknowns, {'u': net, 'k': k}",
        "optimizer": "it is the optimizer",
        "iterations": "write opt.fit(steps, sample)",
        "epochs": "write opt.fit(steps, sample)",
    },
    "maximize_likelihood": {
        "weights": "make them a tensor of the data, by which the function multiplies the log likelihood of a row",
        "offset": "make it a tensor of the data, which the function adds",
        "bounds": "write what must be positive by its logarithm, and shares by their logits",
        "constraints": "write what must be positive by its logarithm, and shares by their logits",
        "method": "metric= says by which information",
        "cov_type": "write fit.standard_errors(robust=True)",
        "tol": "write tolerance=, in standard errors",
    },
    "minimize": SEARCHES
    | {
        "args": "write lambda x: f(x, *args)",
        "noise_handler": "write noise=True",
        "parallel_objective": "write executor=, or let f take a batch",
        "bipop": "write restarts='BIPOP'",
        "incpopsize": "write restarts=ng.search.IPOP(9, factor=2)",
        "verbose": "write progress=True or False",
        "disp": "write progress=True or False",
        "constraints": "bounds= are all that there are",
        "method": "it is CMA-ES, and model= says with which covariance",
    },
    "GaussianSearch": SEARCHES
    | {"ftarget": "compare search.best.fun with it", "maxfevals": "compare search.nfev with it"},
    "run": {"n_iter": "write steps=", "out": "it returns the energies, and callback= sees each step"},
}
"""Arguments of other packages, by our function: what stands here instead."""


class Package(ModuleType):
    """A module of natgrad whose call is a sentence: `ng.vmc("ising")` takes a module for a function."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        things = {name: getattr(self, name) for name in getattr(self, "__all__", ())}
        names = [name for name, thing in things.items() if callable(thing) and not isinstance(thing, ModuleType)]
        subject = (self.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        name = "ng" + self.__name__.removeprefix("natgrad")
        raise TypeError(
            f"{name} is a module and no function ({subject})"
            + f": call one of its names, {', '.join(names[:FEW])}{', ...' * (len(names) > FEW)}" * bool(names)
            + "".join(f", as in {line}" for line in list_prompts(self.__doc__)[-1:])
            + f"; help({name}) shows them"
        )

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        return import_module, (self.__name__,)  # as cloudpickle does with plain modules


class CallableModule(Package, Generic[P, R]):
    """A package that is called: `ng.residuals(...)` is the function `residuals` that it holds."""

    __wrapped__: Callable[P, R]  # where inspect.signature looks

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.__wrapped__(*args, **kwargs)

    if TYPE_CHECKING:  # what it holds; `from natgrad.residuals import Causal` has the type too

        def __getattr__(self, name: str) -> Any: ...


def make_callable(package: str, function: Callable[P, R]) -> CallableModule[P, R]:
    """The package, of which a call is from now on a call of its function; its docstring shows that of both."""
    module: Any = sys.modules[package]
    module.__class__ = CallableModule
    module.__wrapped__ = function
    module.__doc__ = f"{module.__doc__}\nng.{function.__name__}(...):\n\n{inspect.getdoc(function)}\n"
    return module


def resolve_names(package: str, fields: Mapping[str, Sequence[str]] | None = None) -> None:
    """Let a package load a name from its module in `fields` once it is asked for, and say what of others was meant."""
    homes = {name: home for home, names in (fields or {}).items() for name in names}
    module: Any = sys.modules[package]
    for thing in [module, *vars(module).values()]:
        if type(thing) is ModuleType and thing.__name__.startswith("natgrad"):
            thing.__class__ = Package  # a call of which says what may be called instead

    def find(name: str) -> Any:
        if name not in homes:
            near = suggest_name(name, sys.modules["natgrad"])
            raise AttributeError(f"module {package!r} has no attribute {name!r}{near}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        thing = getattr(import_module(homes[name]), name)
        setattr(module, name, thing)
        return thing

    # set here, and not by a def in the package: type checkers would then take any name for one that exists
    module.__getattr__ = find


def suggest_name(name: str, package: ModuleType) -> str:
    """`; did you mean ng.kfac?`, or nothing where no name is near."""
    if name.startswith("_"):
        return ""
    known = {key: getattr(package, key) for key in dir(package) if not key.startswith("_")}
    folders = [thing for thing in known.values() if isinstance(thing, ModuleType)]
    places = {spell_plainly(n): f"{m.__name__}.{n}" for m in folders for n in getattr(m, "__all__", ())}
    places |= {spell_plainly(n): f"{package.__name__}.{n}" for n in known}
    plain = spell_plainly(name)
    foreign = {spell_plainly(word): place for place, names in ELSEWHERE.items() for word in names.split()}
    if plain not in places and plain in foreign:
        return f"; did you mean {foreign[plain]}, which takes the place of {name} here?"
    near = [plain] if plain in places else get_close_matches(plain, places, n=1, cutoff=0.8)
    return f"; did you mean {places[near[0]]}?" if near else ""


def spell_plainly(name: str) -> str:
    """In small letters and without underscores."""
    return name.lower().replace("_", "")


# Calls that cannot be: what came, how the thing is called, and an example, in place of Python's own words

FEW = 8  # arguments that a sentence lists


def explain_calls(function: Callable[P, R], hint: Callable[..., str] | None = None) -> Callable[P, R]:
    """The function, whose TypeError for arguments that it does not take is a sentence."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:
                raise  # from inside of the function
            wrong = describe_call(function.__name__, inspect.signature(function), function.__doc__, args, kwargs)
            if not wrong:
                raise
            more = "" if hint is None else hint(*args, **kwargs)
            raise TypeError(wrong + more) from None

    return call


class ExplainedType(ABCMeta):
    """The type of classes whose wrong calls are sentences: arguments that do not fit, and base classes."""

    if not TYPE_CHECKING:

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__.tb_next is not None:
                    raise
                wrong = describe_base(cls) or describe_call(
                    cls.__name__, inspect.signature(cls), cls.__doc__, args, kwargs
                )
                if not wrong:
                    raise
                raise TypeError(wrong + cls.call_hint) from None

        @property
        def __signature__(cls) -> inspect.Signature:
            """As without this type: that of `__init__`."""
            if cls.__init__ is object.__init__:
                return inspect.Signature()
            plain = inspect.signature(cls.__init__)
            return plain.replace(parameters=list(plain.parameters.values())[1:])


class Explained(metaclass=ExplainedType):
    """A base class in place of `abc.ABC`, whose wrong calls are sentences."""

    call_hint: ClassVar[str] = ""
    """What such a sentence ends with."""


def describe_base(kind: type) -> str:
    """What to do instead of building a base class; empty for any other class."""
    lacking = sorted(getattr(kind, "__abstractmethods__", ()))
    if not lacking:
        return ""
    ready = sorted({cls.__name__ for cls in list_derived(kind) if not cls.__name__.startswith("_")})
    names = ", ".join(ready[:6]) + ", ..." * (len(ready) > 6)
    return (
        f"{kind.__name__} is a base class: derive a class of your own with {', '.join(lacking)}, as help() of it shows"
        + f", or take one that there is: {names}" * bool(ready)
    )


def list_derived(kind: type) -> list[type]:
    """The classes of natgrad below a base class that can be built."""
    below = [cls for child in kind.__subclasses__() for cls in [child, *list_derived(child)]]
    return [cls for cls in below if cls.__module__.startswith("natgrad.") and not inspect.isabstract(cls)]


def describe_call(
    name: str, signature: inspect.Signature, doc: str | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str:
    """What is wrong with a call, how it is made, and an example of the docstring; empty if the arguments fit."""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        pass
    else:
        return ""
    own = [p for p in signature.parameters.values() if p.name != "self"]
    came = list(args[1:] if "self" in signature.parameters else args)
    ordered = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    unknown = [key for key in kwargs if key not in {p.name for p in own}]
    missing = [p.name for p in ordered[len(came) :] if p.default is p.empty and p.name not in kwargs]
    missing += [p.name for p in own if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in kwargs]
    if unknown:
        near = get_close_matches(unknown[0], [p.name for p in own], 1)
        advice = ARGUMENTS.get(name, {}).get(unknown[0]) or (f"did you mean {near[0]!r}?" if near else "")
        reason = f"it has no argument {unknown[0]!r}" + f", {advice}" * bool(advice)
    elif missing:
        reason = f"{' and '.join(map(repr, missing))} {'is' if len(missing) == 1 else 'are'} missing"
    elif len(came) > len(ordered):
        reason = f"{len(came)} arguments came in order, and it takes {len(ordered)}"
        reason += "; write the entries of a dict as arguments" * isinstance(came[len(ordered)], Mapping)
    else:
        reason = "an argument came twice"
    shown = [type(value).__name__ for value in came] + [
        f"{key}={type(value).__name__}" for key, value in kwargs.items()
    ]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    takes = [stars.get(p.kind, "") + p.name + "=..." * (p.default is not p.empty) for p in own]
    takes = takes if len(takes) <= FEW else [*takes[: FEW - 1], "..."]
    lines = list_prompts(doc)
    calls = [line.partition("  #")[0] for line in lines if f"{name}(" in line and line.count("(") == line.count(")")]
    example = "".join(f", as in {call}" for call in calls[:1])
    return f"{name}({', '.join(shown)}): {reason}; expected {name}({', '.join(takes)}){example}"


def list_prompts(doc: str | None) -> list[str]:
    """The lines to type in a docstring's example."""
    lines = [line.strip() for line in (doc or "").splitlines()]
    return [line.removeprefix(">>> ") for line in lines if line.startswith(">>> ")]
