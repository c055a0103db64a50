"""Teaching pictures: pure functions that give a plotly figure, `pictures.<topic>.<name>(…)`, loaded topic by topic.

They show how something works, by rule or formula; where a picture has times, its title says whether they are modelled or a run's own.
"""

import importlib
from types import ModuleType

TOPICS = ("collectives", "data_parallel", "fit", "input_pipeline", "mesh", "pipeline", "sharding", "tensor_parallel")


def __getattr__(name: str) -> ModuleType:
    if name not in TOPICS:
        raise AttributeError(f"there are no pictures of {name!r}; there are those of {', '.join(TOPICS)}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return [*TOPICS]
