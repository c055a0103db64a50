"""The callback for Lightning."""

from __future__ import annotations

from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:  # the package under its older name
    from pytorch_lightning import Callback, LightningModule, Trainer

from labkit.integrations import log_metrics


class LightningCallback(Callback):
    """Records what the module has logged with `self.log` as metrics of the lab, after each epoch of training and each
    validation, from rank 0 as Lightning's own loggers do; harmless without the lab. Steps and losses need no callback.
    """

    def __init__(self) -> None:
        super().__init__()
        self._step, self._names = -1, set[str]()  # what was recorded after this step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the metrics of the epoch."""
        self._record(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Records the metrics of the validation; the sanity check before training is none."""
        if not trainer.sanity_checking:
            self._record(trainer)

    def _record(self, trainer: Trainer) -> None:
        """Records what has not been recorded after this step: an epoch may end with a validation."""
        if trainer.global_step != self._step:
            self._step, self._names = trainer.global_step, set()
        values: dict[str, Any] = {**trainer.callback_metrics, "epoch": trainer.current_epoch}
        new = {name: value for name, value in values.items() if name not in self._names}
        self._names |= new.keys()
        if trainer.is_global_zero:
            log_metrics("lightning", new)
