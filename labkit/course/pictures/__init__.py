"""Teaching pictures: pure functions that return a plotly figure, `pictures.<topic>.<name>(…)`; topics are imported
lazily. `pictures.atlas(…)` draws published runs.

They show how something works, by rule or formula. If a picture has times, its title says whether they are modelled or
measured.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

TOPICS = (
    "batch_size", "collectives", "context_parallel", "data_parallel", "expert_parallel", "failures", "fit",
    "input_pipeline", "launching", "links", "mesh", "nodes", "pipeline", "precision", "roofline", "sharding",
    "tensor_parallel",
)  # fmt: skip
_DRAWN_IN = {  # topics that share a module
    **{"failures": "launching", "fit": "sharding", "precision": "sharding"},
    **dict.fromkeys(("links", "mesh", "nodes", "roofline"), "clusters"),
    **dict.fromkeys(("context_parallel", "expert_parallel", "tensor_parallel"), "model_parallel"),
}


def atlas(*, by: str = "model", **wanted: Any) -> go.Figure:
    """Published runs on real GPUs, one dot each: speed by number of GPUs, measured and modelled speed and memory, and
    the runs that failed. Colours show the model, tp, pp, sharding, gpus or source (`by`). `wanted` chooses runs, as in
    `labkit.atlas`, and raises the same errors."""
    from labkit.figures.atlas import Atlas
    from labkit.prediction.scale.atlas import select

    return Atlas(select(**wanted)).figure(by)


def __getattr__(name: str) -> ModuleType:
    if name not in TOPICS:
        raise AttributeError(f"there are no pictures of {name!r}; the topics are {', '.join(TOPICS)}")
    return importlib.import_module(f"{__name__}.{_DRAWN_IN.get(name, name)}")


def __dir__() -> list[str]:
    return ["atlas", *TOPICS]
