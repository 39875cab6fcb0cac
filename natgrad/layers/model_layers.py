"""What there is to listen to in a model: layers, matrices that no layer's own call explains, and the graph's leaves."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.ground.densities import Density, Energy
from natgrad.ground.pure import Hook
from natgrad.ground.spaces import Space
from natgrad.ground.whole_tensors import is_split
from natgrad.layers.kinds import RECURRENT, Layer, class_of, known_layers
from natgrad.layers.taps import Taps, tap
from natgrad.layers.traced import Traced, matrices_of, second_layers, traced_layers

# their flags() also sets the precision of products, and warns where it cannot
LIBRARIES: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.mkldnn)


class Unroll(Hook):
    """Forward pre-hook of one recurrent module: do without the fused kernels, in passes that are listened to.

    oneDNN runs an LSTM in float32, and cuDNN every recurrent module on a GPU, as one node of the graph. Without them
    torch takes one product with each matrix and step, to the same numbers up to round-off: what goes into a product
    and the derivative at it can then be read (`natgrad.layers.traced`).

    Args:
        owner: Its `listens()` says whether the next pass is read; the hook does not keep it alive.
        flags: Where those that were in force lie until the pass ends.
    """

    def __init__(self, owner: Any, flags: list[list[bool]]) -> None:
        self.owner, self.flags = weakref.ref(owner), flags

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        owner = self.owner()
        if owner is None or torch.compiler.is_compiling() or not torch.is_grad_enabled() or not owner.listens():
            return
        if torch.backends.flags_frozen():  # torch.backends.disable_global_flags() was called
            return
        self.flags.append([library.enabled for library in LIBRARIES])
        for library in LIBRARIES:
            library.enabled = False


class Fuse(Hook):
    """Forward hook of that module: take the fused kernels again, after an exception too."""

    def __init__(self, flags: list[list[bool]]) -> None:
        self.flags = flags

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.flags:
            for library, enabled in zip(LIBRARIES, self.flags.pop(), strict=True):
                library.enabled = enabled


# What there is to listen to in a model: layers, matrices that no layer's own call explains, and the graph's leaves


@dataclass(frozen=True)
class ModelLayers:
    """The layers of a model.

    Args:
        known: Modules of a known kind, each as a layer.
        matrices: Those of other modules, found by their products in the graph of a pass.
        spare: The known layers' own matrices, in case the model also uses them outside of their layer.
        turned: Those of `matrices` that a model may use as y = x W, the other way round.
    """

    known: dict[nn.Module, Layer] = field(default_factory=dict)
    matrices: list[Traced] = field(default_factory=list)
    spare: list[Traced] = field(default_factory=list)
    turned: list[Traced] = field(default_factory=list)

    @staticmethod
    def of(model: Any, params: Mapping[str, Tensor], density: Any = None) -> ModelLayers:
        """The layers that hold some parameters.

        Args:
            model: A module; anything else has no layers.
            params: Those that are trained, by name.
            density: Whose scores the outputs are: its layers' calls lie inside a derivative, so that all its matrices
                are looked for in the graph.
        """
        space, known = Space(params), dict[nn.Module, Layer]()
        matrices = list[Traced]()
        if isinstance(model, nn.Module):
            known = known_layers(model, space)
            matrices = traced_layers(model, space, known.values())
        if isinstance(density, Density):
            matrices = traced_layers(density.module, space, ()) if isinstance(density, Energy) else matrices_of(params)
        turned = [other for layer in matrices if (other := layer.turn()) is not None]
        return ModelLayers(known, matrices, second_layers(known.values()), turned)

    def restrict(self, claims: Set[str]) -> ModelLayers:
        """Those of which all claims are among these, the spare ones as matrices like the others.

        Args:
            claims: As layers make them.
        """
        known = {module: layer for module, layer in self.known.items() if claims >= set(layer.claims)}
        matrices = [layer for layer in [*self.list_matrices(claims), *self.spare] if claims >= set(layer.claims)]
        return ModelLayers(known, matrices, self.spare)

    def list_matrices(self, claims: Set[str] = frozenset()) -> list[Traced]:
        """The matrices, each both ways round until one of them is trusted.

        Args:
            claims: Those that are.
        """
        if not self.turned:
            return self.matrices
        turned = {layer.layout.names: layer for layer in self.turned if claims >= set(layer.claims)}
        matrices = [turned.get(layer.layout.names, layer) for layer in self.matrices]
        return matrices + [layer for layer in self.turned if claims.isdisjoint(layer.claims)]

    @property
    def first(self) -> list[Layer]:
        """All but the spare ones."""
        return [*self.known.values(), *self.matrices]

    @property
    def by_key(self) -> dict[str, Layer]:
        """Every layer and matrix, the turned and spare ones too, by key."""
        return {layer.key: layer for layer in [*self.first, *self.turned, *self.spare]}

    def unroll(self, owner: Any) -> list[RemovableHandle]:
        """Run recurrent modules in products that the graph shows.

        Args:
            owner: Its `listens()` says in which passes.

        Returns:
            Handles, whose `remove()` takes the hooks off.
        """
        handles = []
        for module in dict.fromkeys(layer.module for layer in self.matrices if layer.module is not None):
            if class_of(module) in RECURRENT:
                flags = list[list[bool]]()
                handles.append(module.register_forward_pre_hook(Unroll(owner, flags)))
                handles.append(module.register_forward_hook(Fuse(flags), always_call=True))
        return handles

    def hook(self, model: nn.Module, taps: Taps, leaves: GraphLeaves) -> list[RemovableHandle]:
        """Record the calls of the user's own passes.

        Args:
            model: The model.
            taps: Where calls are recorded.
            leaves: What the passes used for the parameters.

        Returns:
            Handles, whose `remove()` takes the hooks off.
        """
        return [*tap(taps, self.known), *self.unroll(taps), *leaves.listen(model)]


class GraphLeaves(Mapping[str, Tensor]):
    """Name -> the leaf of the graph of the last pass that stands for the parameter.

    `fully_shard` puts whole tensors in the place of the parameters while a pass runs.

    Args:
        named: The parameters by name.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = dict(named)
        self.found: dict[str, Tensor] = {}

    def listen(self, model: nn.Module) -> list[RemovableHandle]:
        """Look at every module with a split parameter in it, just before it runs. The handles take the hooks off.

        What is in it counts too: attention takes the weight of its last layer and does not call that.

        Args:
            model: The model.
        """
        names = {id(p): name for name, p in self.named.items() if is_split(p)}
        handles = []
        for module in model.modules() if names else ():
            held = [
                (part, key, names[id(p)])
                for part in module.modules()
                for key, p in part.named_parameters(recurse=False)
                if id(p) in names
            ]
            if held:
                handles.append(module.register_forward_pre_hook(LeafListener(self, held)))
        return handles

    def __getitem__(self, name: str) -> Tensor:
        return self.found.get(name, self.named[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)


class LeafListener(Hook):
    """Forward pre-hook of one module, of modules, their keys and the names of their parameters in the model."""

    def __init__(self, leaves: GraphLeaves, held: Iterable[tuple[nn.Module, str, str]]) -> None:
        self.leaves = weakref.ref(leaves)
        self.held = [(weakref.ref(module), key, name) for module, key, name in held]

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        leaves = self.leaves()
        if leaves is None:
            return
        for part, key, name in self.held:
            leaf = getattr(part(), key, leaves.named[name])
            if leaf is not leaves.named[name]:  # else it lies in its parts now, and may have been whole before
                leaves.found[name] = leaf
