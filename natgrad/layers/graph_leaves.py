"""The tensors that a pass really used for the parameters: `fully_shard` puts whole ones in their place meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from natgrad.whole_tensors import is_split


class GraphLeaves(Mapping[str, Tensor]):
    """Name -> the leaf of the graph of the last pass that stands for the parameter.

    Args:
        named: The parameters by name.
    """

    def __init__(self, named: Mapping[str, Tensor]) -> None:
        self.named = dict(named)
        self.found: dict[str, Tensor] = {}

    def listen(self, model: nn.Module) -> list[RemovableHandle]:
        """Look at every module that holds a split parameter, just before it runs. The handles take the hooks off.

        Args:
            model: The model.
        """
        names = {id(p): name for name, p in self.named.items() if is_split(p)}
        handles = []
        for module in model.modules() if names else ():
            own = {key: names[id(p)] for key, p in module.named_parameters(recurse=False) if id(p) in names}
            if own:
                handles.append(module.register_forward_pre_hook(LeafListener(self, own)))
        return handles

    def __getitem__(self, name: str) -> Tensor:
        return self.found.get(name, self.named[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.named)

    def __len__(self) -> int:
        return len(self.named)


class LeafListener:
    """Forward pre-hook of one module. That of a copied or pickled model does nothing.

    Args:
        leaves: Told; not kept alive.
        names: The parameters' names by the module's own.
    """

    def __init__(self, leaves: GraphLeaves | None = None, names: Mapping[str, str] | None = None) -> None:
        self.leaves = None if leaves is None else weakref.ref(leaves)
        self.names = dict(names or {})

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        leaves = None if self.leaves is None else self.leaves()
        if leaves is not None:
            leaves.found |= {
                self.names[key]: p for key, p in module.named_parameters(recurse=False) if key in self.names
            }

    def __reduce__(self) -> tuple[type[LeafListener], tuple[()]]:
        return LeafListener, ()
