"""The tracker for accelerate."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

from labkit.integrations import log_metrics


class Tracker(GeneralTracker):
    """Records what is passed to `accelerator.log` as metrics of the lab, from the main process; harmless without the
    lab. Steps and losses need no tracker. The lab's own count of steps is used, not `step`; the configuration given to
    `init_trackers` is not recorded."""

    name = "labkit"
    requires_logging_directory = False

    @property
    def tracker(self) -> Tracker:
        """This object: there is no other tracker behind it."""
        return self

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Does nothing: the run folder has the script and its arguments."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Records the values."""
        log_metrics("accelerate", values)
