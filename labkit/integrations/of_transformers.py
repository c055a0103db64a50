"""The callback for the Trainer of transformers."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import TrainerControl, TrainerState, TrainingArguments

from labkit.integrations import log_metrics


class TrainerCallback(transformers.TrainerCallback):
    """Records what the Trainer logs (`eval_loss`, `learning_rate`, `grad_norm`, metrics of `compute_metrics`) as
    metrics of the lab, from the main process; harmless without the lab. Steps and losses need no callback."""

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Records the logged values."""
        if state.is_world_process_zero:
            log_metrics("transformers", logs or {})
