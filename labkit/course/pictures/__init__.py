"""Teaching pictures: pure functions that return a plotly figure, `pictures.<topic>.<name>(…)`; topics are imported
lazily.

They show how something works, by rule or formula. If a picture has times, its title says whether they are modelled or
measured.
"""

import importlib
from types import ModuleType

TOPICS = (
    *("collectives", "data_parallel", "fit", "input_pipeline", "links", "mesh", "pipeline", "roofline", "sharding"),
    "tensor_parallel",
)


def __getattr__(name: str) -> ModuleType:
    if name not in TOPICS:
        raise AttributeError(f"there are no pictures of {name!r}; the topics are {', '.join(TOPICS)}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*TOPICS]
