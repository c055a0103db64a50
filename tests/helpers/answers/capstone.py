"""Answers to the exercises of lab 17."""

import ast
from pathlib import Path

from answers.profiles import changed, script

from labkit import run
from labkit.course.build.solutions import capstone as mesh
from labkit.course.build.starters import mesh_training
from labkit.course.exercises import layouts as capstone

TWIN = {"workload": "gpt", "nproc": 4, "device": "cpu", "batch_size": 1, "steps": 5, "samples": 20}
STARTER = Path(mesh_training.__file__).read_text(encoding="utf-8")


def _solved():
    """The starter with the definitions of the reference solution."""
    written = Path(mesh.__file__).read_text(encoding="utf-8")
    own = "\n\n\n".join(
        ast.get_source_segment(written, node) for node in ast.parse(written).body if hasattr(node, "name")
    )
    (given,) = [node for node in ast.parse(STARTER).body if getattr(node, "name", "") == "Training"]
    return changed(STARTER, (ast.get_source_segment(STARTER, given), own))


SOLVED = _solved()


def trainer(*changes):
    """The path of the solved script with each (old, new) of `changes` replaced."""
    return script(changed(SOLVED, *changes), "mesh_training.py")


def per_rank(parameters, numbers, micro_batches, blocks, data, pipeline, tensor):
    own = 4 * parameters / (pipeline * tensor)
    activations = 4 * numbers * micro_batches
    along_tensor = blocks / pipeline * 8 * (tensor - 1) / tensor * activations
    return own + 2 * own / data, 2 * (data - 1) / data * own, activations / tensor, along_tensor


def without_shards(parameters, numbers, micro_batches, blocks, data, pipeline, tensor):
    stored, along_data, along_pipeline, along_tensor = per_rank(
        parameters, numbers, micro_batches, blocks, data, pipeline, tensor
    )
    return stored, along_data, along_pipeline * tensor, along_tensor


RIGHT = {
    "bytes": per_rank,
    "trainer": lambda: trainer(),
    "layout": lambda: capstone._advice(**capstone.case_of_learner()).fitting[0].layout.title,
    "twin": lambda: run("fsdp2_tp", options={"size": "10M"}, **TWIN).wait(),
    "published": "dp=2,tp=4,pp=16,zero=1,micro_batch=1",
}
WRONG = {
    "bytes": (without_shards, "has its own positions only"),
    "trainer": (lambda: trainer(("MICRO_BATCHES * DATA)", "DATA)")), "divide the loss by the number of micro-batches"),
    "layout": (lambda: f"FSDP {capstone.case_of_learner()['devices']}", "fits only with recomputation"),
    "twin": (
        lambda: run("fsdp2", workload="mlp", nproc=2, device="cpu", steps=2, samples=64, batch_size=8).wait(),
        "gpt of size 10M on 4 ranks, got mlp on 2",
    ),
    "published": ("tp=16,zero=1,micro_batch=1", "of the fastest; by the formulas"),
}
DEVICE_MESH = [  # another right answer: a mesh of torch, and sums per micro-batch, before their gradients are added up
    (
        "        self.data, self.pipeline, self.tensor = groups()\n",
        '        mesh = dist.init_device_mesh("cpu", (DATA, PIPELINE, TENSOR), mesh_dim_names=("d", "p", "t"))\n'
        '        self.data, self.pipeline, self.tensor = (mesh.get_group(name) for name in "dpt")\n',
    ),
    (
        "        for group in (self.pipeline, self.data):\n            dist.all_reduce(loss, group=group)\n",
        "        dist.all_reduce(loss)\n        loss /= TENSOR\n",
    ),
]
REPLICATED = "                dist.all_reduce(parameter.grad, group=self.tensor)\n"
MISTAKES = {  # honest ones and cheats: changes of the solution, and words of the verdict
    "norms": (
        [(REPLICATED, "                pass\n")],
        "those of the rank's own positions: these parameters are replicated",
    ),
    "wrong group": (
        [("make_optimizer, self.data)", "make_optimizer, self.tensor)")],
        "B along the data axis, expected at least",
    ),
    "keeps the model": (
        [("        self.optimizer = ZeRO1(", "        self.whole = parameters\n        self.optimizer = ZeRO1(")],
        "memory: after the construction, rank",
    ),
    "computes twice": (
        [
            (
                "        mixed = self.attention(gather(self.norm1(x), self.group))\n",
                "        y = gather(self.norm1(x), self.group)\n"
                "        mixed = (self.attention(y) + self.attention(y)) / 2\n",
            )
        ],
        "computation: in step of step 0, the matrix products of rank",
    ),
}
