"""A state of an optimizer as torch's per-parameter form and as files: written, read, checked, packed for DCP."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from natgrad.ground.pure import map_tensors
from natgrad.ground.state_files import FORMAT, check_format, read_state_file, write_state_file
from natgrad.ground.typed_torch import is_mapping, list_numbers

PLAIN = (bool, int, float, str, type(None))
WRITTEN = 2**16
"""Most bytes of a tensor that is written into the text."""


def pack_tree(tree: Any, device: torch.device) -> tuple[Any, ...]:
    """A text that says how a tree is made, an empty tensor, and the tree's tensors on a device."""
    others: list[Any] = [torch.empty(0, device=device)]
    text = json.dumps(describe_branch(tree, others))
    return (text, *others)


def describe_branch(branch: Any, others: list[Any]) -> Any:
    """What the text says of a branch; what cannot be said is appended to `others`."""
    if isinstance(branch, PLAIN):
        return branch
    if isinstance(branch, Tensor):
        return describe_tensor(branch, others)
    if isinstance(branch, Mapping):
        pairs = cast("Mapping[Any, Any]", branch).items()
        return {"map": [[describe_branch(part, others) for part in pair] for pair in pairs]}
    if type(branch) in (list, tuple):
        return {type(branch).__name__: [describe_branch(part, others) for part in branch]}
    others.append(branch)
    return {"at": len(others) - 1}


def describe_tensor(tensor: Tensor, others: list[Any]) -> dict[str, Any]:
    """Where a tensor lies in `others`, or its numbers."""
    if tensor.device == others[0].device or tensor.nbytes > WRITTEN:
        others.append(tensor if tensor.dim() else tensor.reshape(1))
        return {"at": len(others) - 1, "shape": list(tensor.shape)}
    numbers = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return {"hex": bytes(list_numbers(numbers)).hex(), "dtype": str(tensor.dtype)[6:], "shape": list(tensor.shape)}


def unpack_tree(packed: Sequence[Any]) -> Any:
    """The tree that `pack_tree` was given."""
    try:
        return build_branch(json.loads(packed[0]), packed)
    except (IndexError, KeyError, TypeError, RuntimeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"the packed state in state_dict cannot be read ({type(error).__name__}: {error}): a part was lost on its "
            "way. With several processes, load the whole state on each and leave broadcast_from_rank0=True out. "
            "Nothing was changed"
        ) from error


def build_branch(said: Any, packed: Sequence[Any]) -> Any:
    """The branch that the text says."""
    if not is_mapping(said):
        return said
    if "map" in said:
        return {build_branch(key, packed): build_branch(value, packed) for key, value in said["map"]}
    if "list" in said:
        return [build_branch(part, packed) for part in said["list"]]
    if "tuple" in said:
        return tuple(build_branch(part, packed) for part in said["tuple"])
    if "hex" in said:
        numbers = torch.tensor(list(bytes.fromhex(said["hex"])), dtype=torch.uint8)
        return numbers.view(getattr(torch, said["dtype"])).reshape(said["shape"])
    tensor = packed[1 + said["at"]]
    return tensor.reshape(()) if said.get("shape") == [] else tensor


# Checkpoints of trainers that are made of parts: optimizers, generators, running moments, counts


class Attributes:
    """Plain values that an object holds, as one part: a number, or a tuple of several.

    Args:
        owner: The object.
        names: Of its attributes.
    """

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner, self.names = owner, names

    def state_dict(self) -> Any:
        """The value, or a tuple of them."""
        values = tuple(getattr(self.owner, name) for name in self.names)
        return values[0] if len(values) == 1 else values

    def load_state_dict(self, state: Any) -> None:
        """Give the owner these values.

        Args:
            state: What `state_dict` gave.
        """
        values = (state,) if len(self.names) == 1 else tuple(state)
        for name, value in zip(self.names, values, strict=True):
            setattr(self.owner, name, value)


def write_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The state of every part under its name, and the number of the format.

    Args:
        parts: Objects with `state_dict` and `load_state_dict`, or generators.
    """
    return {"format": FORMAT} | {name: write_part(part) for name, part in parts.items()}


def write_part(part: Any) -> Any:
    """The state of a part."""
    return part.get_state() if isinstance(part, torch.Generator) else part.state_dict()


def read_parts(parts: Mapping[str, Any], state: Any, saver: str, optional: Set[str] = frozenset()) -> None:
    """Go on from what `write_parts` gave. All parts are as before where one does not fit.

    Args:
        parts: As they were written.
        state: What was saved.
        saver: Who saves such a state, for the error message.
        optional: Names that older checkpoints lack; those parts are left as they are.

    Raises:
        ValueError: If an entry is missing, or does not fit its part; for the format of a newer version.
    """
    require_entries(parts.keys() - optional, state, saver)
    check_format(state)
    present = {name: part for name, part in parts.items() if name in state}
    before: dict[str, Any] = {}
    for name, part in present.items():
        before[name] = deepcopy(write_part(part))
        try:
            read_part(part, state[name])
        except Exception as error:
            for changed, old in before.items():
                read_part(present[changed], old)
            raise ValueError(
                f"the saved {name!r} is that of another network, environment or setting: {error}. Nothing was changed"
            ) from error


def read_part(part: Any, state: Any) -> None:
    """Give a part its state."""
    if isinstance(part, torch.Generator):
        part.set_state(state.cpu())
    else:
        part.load_state_dict(state)


def require_entries(names: Set[str], state: Any, saver: str) -> None:
    """ValueError unless a state has all these entries."""
    missing = sorted(name for name in names if not isinstance(state, Mapping) or name not in state)
    if missing:
        raise ValueError(
            f"the saved state lacks {missing}: a part was lost, or it was not saved by {saver}. Nothing was changed"
        )


# A run's checkpoint in one file: model, optimizer, scheduler and what else has a state


def save_checkpoint(path: str | Path, **parts: Any) -> None:
    """Write the state of every part to one file: whole, or not at all.

    A crash, a full disk or a killed process leaves the file that was there before. `torch.load(weights_only=True)`
    reads it. With several processes the first one's file serves all: save there alone, and load everywhere.

    Args:
        path: Of the file.
        **parts: What has `state_dict` and `load_state_dict` (a model, optimizers, a scheduler, a search), or is a
            `torch.Generator`.

    Raises:
        OSError: If it could not be written.

    Example:
        >>> import tempfile, os
        >>> model = nn.Linear(2, 1)
        >>> opt = ng.kfac(model, nn.MSELoss())
        >>> path = os.path.join(tempfile.mkdtemp(), "run.pt")
        >>> ng.save_checkpoint(path, model=model, optimizer=opt)
        >>> ng.load_checkpoint(path, model=model, optimizer=opt)
    """
    write_state_file(write_parts(parts), path)


def load_checkpoint(path: str | Path, **parts: Any) -> None:
    """Go on from what `save_checkpoint` wrote. Every part fits, or none is changed.

    Args:
        path: Of the file.
        **parts: As they were saved, by the same names, newly built or in use.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file was cut off or damaged, is of a newer format, or lacks a part that fits.

    Example:
        >>> import tempfile, os
        >>> path, generator = os.path.join(tempfile.mkdtemp(), "run.pt"), torch.Generator()
        >>> ng.save_checkpoint(path, generator=generator)
        >>> ng.load_checkpoint(path, generator=generator)
    """
    read_parts(parts, read_state_file(path), "ng.save_checkpoint")


# An optimizer's state between runs: written so that it survives on its way, read only where it fits

EXTRA = "natgrad"
ENTRIES = ("state", "param_groups")

Named = Sequence[tuple[str, Tensor]]


@dataclass(frozen=True)
class Format:
    """What a kind of optimizer saves."""

    kind: str  # of its state: of a metric in blocks, or of one that is a linear system
    savers: str  # who writes it, for the error message
    needed: frozenset[str]  # entries without which the rest is no state
    # what is kept for every entry of a parameter; None: all that is kept by parameter
    alike: frozenset[str] | None = None
    older: bool = False  # whether labels may be drawn anew where no generator was saved, as in older checkpoints


@dataclass(frozen=True)
class Checkpoint:
    """What `read_checkpoint` found to fit, in copies of its own."""

    groups: list[dict[str, Any]]  # the groups' values
    state: dict[Tensor, dict[str, Any]]  # by parameter
    extra: dict[str, Any]  # what is not kept by parameter
    labels: Tensor | None  # the state of the source of labels; None where this device's has another form
    moved: list[str]  # the parameters whose dtype is another than it was when they were saved


def name_positions(optimizer: Any) -> Named:
    """Every parameter of an optimizer's groups with its name in the model, in their order."""
    model = optimizer.model
    known = model.named_parameters() if isinstance(model, nn.Module) else model.items()
    names = {id(p): name for name, p in known}
    return [(names.get(id(p), ""), p) for group in optimizer.param_groups for p in group["params"]]


def write_checkpoint(plain: dict[str, Any], named: Named, extra: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict with all that is ours beside what torch wrote."""
    shapes, dtypes = {name: list(p.shape) for name, p in named}, {name: str(p.dtype) for name, p in named}
    extra = {"format": FORMAT, **extra, "shapes": shapes, "dtypes": dtypes}
    state: dict[str, Any] = {named[i][0]: numbers for i, numbers in plain["state"].items()}
    groups = [as_plain(group) for group in plain["param_groups"]]
    first = next((i for i, group in enumerate(groups) if group["params"]), 0)
    device = named[0][1].device if named else torch.device("cpu")
    groups[first] = {**groups[first], EXTRA: pack_tree({"extra": extra, "state": state}, device)}
    arrays = {i: keep_arrays(numbers) for i, numbers in plain["state"].items()}
    return {**plain, "state": arrays, "param_groups": groups, EXTRA: extra}


def as_plain(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group with floats for those of NumPy, which a schedule may leave in it and torch.load does not read."""
    return {key: float(value) if isinstance(value, float) else value for key, value in group.items()}


def keep_arrays(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that torch can add to a fresh optimizer's: tensors of one dimension or more, and mappings of them."""
    arrays: dict[str, Any] = {}
    for key, value in numbers.items():
        if is_mapping(value):
            arrays[key] = keep_arrays(value)
        elif isinstance(value, Tensor) and value.dim():
            arrays[key] = value
    return arrays


def read_checkpoint(
    form: Format, state_dict: Any, optimizer: Any, named: Named, generator: torch.Generator | None
) -> Checkpoint:
    """What `write_checkpoint` wrote, after any way of saving and loading; nothing of the optimizer is touched."""
    bundle = find_whole(state_dict)
    extra: Any = state_dict.get(EXTRA, bundle.get("extra", {})) if is_mapping(state_dict) else {}
    if not is_mapping(extra) or find_kind(extra) != form.kind:
        raise ValueError(f"state_dict has no {EXTRA!r} entry of its kind: it was not saved by {form.savers}")
    check_format(extra)
    remembered = {name for name, p in named if p.requires_grad}
    saved: dict[str, Any] = bundle.get("state", {})
    arrays = {name: keep_arrays(numbers) for name, numbers in saved.items() if name in remembered}
    require("state_dict", state_dict, dict.fromkeys(ENTRIES if any(arrays.values()) or not bundle else ENTRIES[1:]))
    came_groups: list[dict[str, Any]] = state_dict["param_groups"]
    check_groups(came_groups, optimizer)
    numbers: list[Any] = [state_dict.get("state", {}).get(i) for group in came_groups for i in group["params"]]
    came = name_numbers(numbers, [name for name, _ in named], list(bundle.get("extra", {}).get("shapes", ())), arrays)
    # torch.distributed.checkpoint leaves the state of frozen parameters behind, others bring it
    remembered |= {name for name, own in came.items() if own}
    arrays = {name: keep_arrays(numbers) for name, numbers in saved.items() if name in remembered}
    state, extra = fill({name: came[name] for name in remembered}, extra, bundle)
    require(f"state_dict[{EXTRA!r}]", extra, dict.fromkeys(form.needed) | bundle.get("extra", {}))
    check_kind(extra, optimizer.structure)
    check_shapes(extra.get("shapes"), named)
    require("state_dict['state']", state, arrays)
    state = {name: replace_arrays(saved.get(name, {}), numbers) for name, numbers in state.items()} if bundle else state
    memory = {p: own_copy(state.get(name) or {}, p) for name, p in named}
    check_like(memory, named, form.alike)
    settings = ("params", *optimizer._live.settings)
    added = [{k: v for k, v in group.items() if k not in settings} for group in optimizer.param_groups]
    if math.isinf(optimizer.rule.options.get("max_kl", 0.0)):  # which was 10 once where nothing was asked for
        came_groups = [group | {"max_kl": math.inf} if group["max_kl"] == 10 else group for group in came_groups]
    groups = [{**own, **group, EXTRA: ()} for own, group in zip(added, came_groups, strict=True)]
    labels, dtypes = check_generator(extra["generator"], generator, form.older), extra.get("dtypes", {})
    moved = [name for name, p in named if dtypes.get(name, str(p.dtype)) != str(p.dtype)]
    return Checkpoint(groups, memory, dict(extra), labels, moved)


def find_kind(extra: Mapping[str, Any]) -> str | None:
    """The kind of state that this is a part of: up to format 2 by the entries that it has."""
    known = "blocks" if "clock" in extra else "system" if "steps" in extra else None
    return extra.get("kind", known)


def name_numbers(
    numbers: Sequence[Any], names: Sequence[str], saved: Sequence[str], arrays: Mapping[str, Any]
) -> dict[str, Any]:
    """What is kept by position, by name: in this optimizer's order, or in the one that saved where only that one fits.

    Parameters that were renamed in the middle of a run have another order than those of a model that is built so.
    """
    came = dict(zip(names, numbers, strict=True))
    if list(saved) == list(names) or sorted(saved) != sorted(names) or fits(came, arrays):
        return came
    alternative = dict(zip(saved, numbers, strict=True))
    return alternative if fits(alternative, arrays) else came


def fits(state: Mapping[str, Any], template: Mapping[str, Any]) -> bool:
    """Whether `require` would be content."""
    try:
        require("state", state, template)
    except ValueError:
        return False
    return True


def find_whole(state_dict: Any) -> Mapping[str, Any]:
    """The tuple's `extra` and `state`, in whichever group it came; {} where there is none, as in older checkpoints."""
    groups: Sequence[Any] = state_dict.get("param_groups", ()) if is_mapping(state_dict) else ()
    bundles: list[Any] = [group[EXTRA] for group in groups if is_mapping(group) and group.get(EXTRA)]
    if not bundles:
        return {}
    return bundles[0][0] if is_mapping(bundles[0][0]) else unpack_tree(bundles[0])  # a mapping up to format 1


def replace_arrays(saved: Mapping[str, Any], came: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was kept, with the tensors of one dimension or more that came under the same keys."""
    merged = dict(saved)
    for key, value in (came or {}).items():
        if isinstance(saved.get(key), Mapping):
            merged[key] = replace_arrays(saved[key], value)
        elif isinstance(saved.get(key), Tensor) and saved[key].dim():
            merged[key] = value
    return merged


def fill(state: Mapping[str, Any], extra: Mapping[str, Any], bundle: Mapping[str, Any]) -> tuple[Any, Any]:
    """State and extra as they came; the tuple's where a mapping came back empty, as a fresh optimizer's is."""
    if not bundle:
        return state, extra
    emptied = [came_empty(extra.get(key), part) for key, part in bundle["extra"].items()]
    return (bundle["state"], bundle["extra"]) if any(emptied) or came_empty(state, bundle["state"]) else (state, extra)


def came_empty(state: Any, saved: Any) -> bool:
    """Whether a mapping that was not empty is so now, or all in it."""
    if not is_mapping(state) or not is_mapping(saved):
        return False
    complete = not state or state.keys() == saved.keys()  # else a part was lost
    return complete and all(value == {} for value in state.values()) and any(value != {} for value in saved.values())


def require(where: str, state: Any, template: Mapping[str, Any]) -> None:
    """ValueError unless all entries that were kept are there, and all of theirs, and tensors have their shapes."""
    missing = sorted(key for key in template if not is_mapping(state) or key not in state)
    if missing:
        raise ValueError(f"{where} lacks {missing}: a part of the checkpoint was lost on its way. Nothing was changed")
    for key, part in template.items():
        if is_mapping(part):
            require(f"{where}[{key!r}]", state[key], part)
        if isinstance(part, Tensor) and getattr(state[key], "shape", None) != part.shape:
            raise ValueError(f"{where}[{key!r}] is no tensor of shape {tuple(part.shape)}. Nothing was changed")


def check_groups(saved: Sequence[Mapping[str, Any]], optimizer: Any) -> None:
    """ValueError unless the groups have as many parameters each, and all values that a step reads."""
    for k, group in enumerate(saved):
        require(f"state_dict['param_groups'][{k}]", group, dict.fromkeys(("params", *optimizer._live.settings)))
    sizes = [[len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"state_dict has groups of {sizes[0]} parameters, this optimizer's have {sizes[1]}: it belongs to another "
            "model, or to another choice of params. Nothing was changed"
        )


def check_shapes(saved: Mapping[str, Sequence[int]] | None, named: Named) -> None:
    """ValueError unless the parameters that were saved have these names and shapes. None: an older checkpoint."""
    own = {name: list(p.shape) for name, p in named}
    wrong = [] if saved is None else [name for name in {**own, **saved} if list(saved.get(name, ())) != own.get(name)]
    if saved is not None and wrong:
        first = wrong[0]
        raise ValueError(
            f"state_dict belongs to a model whose parameter {first!r} is {saved.get(first, 'missing')}, here it is "
            f"{own.get(first, 'missing')} ({len(wrong)} differ): load it into an optimizer of the model that it was "
            "saved with. Nothing was changed"
        )


def own_copy(numbers: Mapping[str, Any], p: Tensor) -> dict[str, Any]:
    """A parameter's state on its device, each tensor in its own dtype: half-precision ones have float32 statistics."""
    return map_tensors(dict(numbers), lambda t: t.to(p.device).clone())


def check_like(state: Mapping[Tensor, Mapping[str, Any]], named: Named, keys: Set[str] | None) -> None:
    """Check the shapes of what is kept per entry of a parameter."""
    for name, p in named:
        for key in state[p] if keys is None else keys & state[p].keys():
            if tuple(state[p][key].shape) != tuple(p.shape):
                raise ValueError(
                    f"state_dict has a {key!r} of shape {tuple(state[p][key].shape)} for {name!r}, which is "
                    f"{tuple(p.shape)} here: it belongs to another model. Nothing was changed"
                )


def check_kind(extra: Mapping[str, Any], structure: object) -> None:
    """ValueError if what was kept is another structure's. Older checkpoints do not say whose it is."""
    kind = type(structure).__name__
    if extra.get("structure", kind) != kind:
        raise ValueError(
            f"state_dict was saved with the structure {extra['structure']}, this optimizer has {structure!r}: build it "
            "with the one that was saved. Nothing was changed"
        )


def check_generator(state: Tensor | None, generator: torch.Generator | None, older: bool) -> Tensor | None:
    """The state that a generator can take; None where it is of another kind of device, which has another size."""
    if (state is None) != (generator is None) and not older:
        raise ValueError(
            "state_dict and this optimizer's metric disagree on a generator: one of them samples labels, the other "
            "does not; build the optimizer with the metric that was saved. Nothing was changed"
        )
    if state is None or generator is None or state.numel() != generator.get_state().numel():
        return None
    try:
        torch.Generator(generator.device).set_state(state.cpu())
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"the state of the generator in state_dict cannot be read: {error}") from error
    return state.cpu()
