"""Packages that the guides use, on machines where one of them does not fit torch."""

from __future__ import annotations

import sys

import torch

DECLARED: list[torch.library.Library] = []


def declare_image_operators() -> None:
    """Let torchvision be imported where its compiled part was built for another torch, such as one with CUDA.

    It then has no operators of its own, which no guide calls; timm, transformers and lightning import it if they can.
    """
    if DECLARED or "torchvision" in sys.modules:
        return
    try:
        import torchvision  # noqa: F401
    except ModuleNotFoundError:
        return
    except RuntimeError:  # "operator torchvision::nms does not exist"
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DECLARED.append(library)
