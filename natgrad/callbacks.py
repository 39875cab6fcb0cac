"""What training tools get: the numbers of `state_report()`, for Lightning, Hugging Face and any logger.

Neither tool is imported before one of these functions is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from natgrad.families import Criterion
from natgrad.ground.messages import resolve_names
from natgrad.optim import NaturalGradient, StructuredNaturalGradient

__all__ = ["collect_numbers", "log_to_lightning", "log_to_trainer", "trainer_loss"]

resolve_names(__name__)


def collect_numbers(optimizer: Any, prefix: str = "natgrad/") -> dict[str, float]:
    """The last step's numbers under names for a logger: nats moved, damping, length, failures and so on.

    Args:
        optimizer: What has a `state_report()`, or what a tool has wrapped around it.
        prefix: In front of every name.

    Returns:
        Finite numbers only. What does not apply to this optimizer is left out.

    Raises:
        TypeError: If there is no `state_report()` to find.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> opt = ng.kfac(model, nn.CrossEntropyLoss())
        >>> opt.loss(model(x), y).backward()
        >>> opt.step()
        >>> sorted(ng.callbacks.collect_numbers(opt))[:3]
        ['natgrad/damping', 'natgrad/excess', 'natgrad/failures']
    """
    report = find_optimizer(optimizer).state_report()
    return {f"{prefix}{name}": value for name, value in report.numbers().items()}


def find_optimizer(wrapped: Any) -> Any:
    """What has a `state_report()`, behind the wrappers of Lightning and accelerate. TypeError if there is none."""
    inner = wrapped
    while getattr(inner, "optimizer", None) is not None:
        inner = inner.optimizer
    if not hasattr(inner, "state_report"):
        raise TypeError(f"optimizer is {type(inner).__name__}, expected one of natgrad's, with a state_report()")
    return inner


def log_to_lightning(every: int = 1, prefix: str = "natgrad/") -> Any:
    """A callback for Lightning's Trainer that logs the numbers of every natgrad optimizer.

    With several optimizers their place is part of the names: natgrad/0/kl, natgrad/1/kl.

    Args:
        every: Log after this many steps; Lightning writes them at its own `log_every_n_steps`.
        prefix: In front of every name.

    Returns:
        A `lightning.pytorch.Callback`.

    Raises:
        ImportError: Without lightning.
    """
    try:
        from lightning.pytorch import Callback  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        from pytorch_lightning import Callback  # pyright: ignore[reportMissingImports]

    class LightningLog(Callback):  # pyright: ignore[reportGeneralTypeIssues] (one of two packages)
        """Logs `state_report()` after a step."""

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            """Log."""
            if trainer.global_step % every:
                return
            ours = [opt for opt in trainer.optimizers if isinstance(opt, KINDS)]
            for place, opt in enumerate(ours):
                name = prefix if len(ours) == 1 else f"{prefix}{place}/"
                self.log_dict(collect_numbers(opt, name), on_step=True, on_epoch=False)

    return LightningLog()


def log_to_trainer(trainer: Any, prefix: str = "natgrad/") -> Any:
    """Have a Trainer of transformers log the numbers of its optimizer at each of its `logging_steps`.

    They reach TensorBoard, wandb, MLflow and `trainer.state.log_history` as the Trainer's own do.

    Args:
        trainer: The Trainer. The callback is added to it.
        prefix: In front of every name.

    Returns:
        The `transformers.TrainerCallback`, for `trainer.remove_callback`.

    Raises:
        ImportError: Without transformers.
    """
    from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]

    class TrainerLog(TrainerCallback):
        """Logs `state_report()` where the Trainer logs."""

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            """Log."""
            if control.should_log:
                trainer.log(collect_numbers(trainer.optimizer, prefix))

    callback = TrainerLog()
    trainer.add_callback(callback)
    return callback


def trainer_loss(optimizer: Any) -> Callable[..., Tensor]:
    """`optimizer.loss` as the `compute_loss_func` of a Trainer of transformers, right under accumulation.

    The Trainer does not divide by the number of accumulated batches where a loss is given, and says how many labels all
    of them have. Each batch counts by its share of these.

    Args:
        optimizer: A natgrad optimizer on the model.

    Returns:
        (outputs, labels, num_items_in_batch) -> scalar tensor.

    Example:
        >>> model, x, y = nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,))
        >>> loss = ng.callbacks.trainer_loss(ng.kfac(model, nn.CrossEntropyLoss()))
        >>> float((loss(model(x), y, num_items_in_batch=20) / loss(model(x), y)).detach())
        0.5
    """
    inner = find_optimizer(optimizer)

    def compute_loss(outputs: Any, labels: Any, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        value = inner.loss(outputs, labels)
        if num_items_in_batch is None:
            return value
        return value * count_labels(inner.criterion, outputs, labels) / num_items_in_batch

    return compute_loss


def count_labels(criterion: Criterion, outputs: Any, labels: Tensor) -> Tensor | int:
    """How many labels of a batch its mean is over, as the Trainer counts them."""
    ignored = getattr(criterion.family, "ignore_index", None)
    if ignored is None or labels.is_floating_point():
        return labels.numel()
    return criterion.events(outputs, labels).ne(ignored).sum()


KINDS = (NaturalGradient, StructuredNaturalGradient)
