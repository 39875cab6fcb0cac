"""Calls that cannot be: what came, how the thing is called, and an example, in place of Python's own words."""

from __future__ import annotations

import inspect
from abc import ABCMeta
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
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
    """The type of classes whose wrong calls are sentences: arguments that do not fit, and base classes.

    Args:
        name: Of the class.
        bases: Its bases.
        members: Its members.
        hint: What is added to the sentences; default that of the base class.
        **kwargs: For `__init_subclass__`.
    """

    call_hint: str

    def __new__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], *, hint: str | None = None, **kwargs: Any
    ) -> Any:
        made: Any = super().__new__(cls, name, bases, members, **kwargs)
        made.call_hint = getattr(made, "call_hint", "") if hint is None else hint
        return made

    def __init__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], *, hint: str | None = None, **kwargs: Any
    ) -> None:
        super().__init__(name, bases, members, **kwargs)

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


def describe_base(kind: type) -> str:
    """What to do instead of building a base class; empty for any other class."""
    lacking = sorted(getattr(kind, "__abstractmethods__", ()))
    if not lacking:
        return ""
    ready = sorted({one.__name__ for one in list_derived(kind) if not one.__name__.startswith("_")})
    names = ", ".join(ready[:6]) + ", ..." * (len(ready) > 6)
    return (
        f"{kind.__name__} is a base class: derive a class of your own with {', '.join(lacking)}, as help() of it shows"
        + f", or take one that there is: {names}" * bool(ready)
    )


def list_derived(kind: type) -> list[type]:
    """The classes of natgrad below a base class that can be built."""
    below = [one for child in kind.__subclasses__() for one in [child, *list_derived(child)]]
    return [one for one in below if one.__module__.startswith("natgrad.") and not inspect.isabstract(one)]


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
        reason = f"it has no argument {unknown[0]!r}" + (f", did you mean {near[0]!r}?" if near else "")
    elif missing:
        reason = f"{' and '.join(map(repr, missing))} {'is' if len(missing) == 1 else 'are'} missing"
    elif len(came) > len(ordered):
        reason = f"{len(came)} arguments came in order, and it takes {len(ordered)}"
    else:
        reason = "an argument came twice"
    shown = [type(one).__name__ for one in came] + [f"{key}={type(one).__name__}" for key, one in kwargs.items()]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    takes = [stars.get(p.kind, "") + p.name + "=..." * (p.default is not p.empty) for p in own]
    takes = takes if len(takes) <= FEW else [*takes[: FEW - 1], "..."]
    example = find_example(name, doc or "")
    return f"{name}({', '.join(shown)}): {reason}; expected {name}({', '.join(takes)})" + f", as in {example}" * bool(
        example
    )


def find_example(name: str, doc: str) -> str:
    """The first line of a docstring's example that makes a call."""
    lines = [line.strip().removeprefix(">>> ") for line in doc.splitlines() if line.strip().startswith(">>> ")]
    whole = [line.partition("  #")[0] for line in lines if f"{name}(" in line and line.count("(") == line.count(")")]
    return whole[0] if whole else ""
