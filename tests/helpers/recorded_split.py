"""The traffic of real runs that split experts or windows; a part of `recorded_traffic`."""

from __future__ import annotations

from typing import Any

SPLIT: list[tuple[str, str, int, dict[str, Any], dict[str, float]]] = [
    ("ep", "moe", 2, {}, {"all_to_all": 26_214_400, "all_reduce": 3_361_088}),
    ("ep", "moe", 2, {"precision": "bf16"}, {"all_to_all": 13_107_200, "all_reduce": 3_361_088}),
    (
        "ep",
        "moe",
        2,
        {"dense": "sharded", "precision": "bf16", "top_k": 1},
        {"all_gather": 3_361_088, "all_to_all": 6_553_600, "all_reduce": 3_361_088},
    ),
    (
        "ep",
        "moe",
        2,
        {"dense": "sharded", "clip_norm": 1.0, "accumulate": 2},
        {"all_gather": 6_722_176, "all_to_all": 26_214_400, "all_reduce": 6_722_784},
    ),
    (
        "ep",
        "moe",
        4,
        {"clip_norm": 1.0, "checkpoint_activations": True},
        {"all_to_all": 117_964_800, "all_reduce": 10_083_288},
    ),
    ("fsdp", "moe", 2, {}, {"all_gather": 45_411_488, "all_reduce": 45_508_928}),
    ("fsdp", "moe", 2, {"checkpoint_activations": True}, {"all_gather": 67_937_440, "all_reduce": 45_508_928}),
    ("fsdp2", "moe", 2, {"precision": "bf16"}, {"all_gather": 22_754_464, "all_reduce": 45_508_928}),
    ("diloco", "mlp", 2, {"sync_every": 3}, {"all_reduce": 5_357_648}),
    ("diloco", "mlp", 2, {}, {}),
    ("cp", "gpt", 4, {"method": "ring"}, {"all_reduce": 25_764_864, "send": 52_428_800}),
    (
        "cp",
        "gpt",
        2,
        {"method": "ring", "precision": "bf16", "checkpoint_activations": True},
        {"all_reduce": 8_588_288, "send": 13_107_200},
    ),
    ("cp", "gpt", 4, {"method": "ulysses"}, {"all_to_all": 15_728_640, "all_reduce": 25_764_864}),
    (
        "cp",
        "gpt",
        2,
        {"method": "ulysses", "precision": "bf16", "checkpoint_activations": True},
        {"all_to_all": 7_864_320, "all_reduce": 8_588_288},
    ),
    ("cp", "gpt", 2, {}, {"all_gather": 5_242_880, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"accumulate": 2}, {"all_gather": 5_242_880, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"clip_norm": 1.0}, {"all_gather": 5_242_880, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"checkpoint_activations": True}, {"all_gather": 10_485_760, "all_reduce": 19_074_048}),
    ("cp", "gpt", 2, {"precision": "bf16"}, {"all_gather": 2_621_440, "all_reduce": 13_831_168}),
    (
        "cp",
        "gpt",
        2,
        {"checkpoint_activations": True, "precision": "bf16"},
        {"all_gather": 5_242_880, "all_reduce": 13_831_168},
    ),
    ("cp", "gpt", 4, {}, {"all_gather": 15_728_640, "all_reduce": 57_222_144}),
]
