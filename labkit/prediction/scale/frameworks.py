"""What frameworks do differently with the same layout: a table of named recipes.

Each row says what a framework stores per parameter and per token, what it sends, how long its host threads take to
launch the kernels of a layer, and how it splits a pipeline. Figures come from its source code, or, where `source` says
so, from a fit to published runs (labkit/MEASUREMENTS.md). `pytorch` has the textbook figures: the formulas of the
papers, with the kernels of the table of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from labkit.analysis.theory.formulas import RECIPES

USABLE = 0.9  # of a device's memory


@dataclass(frozen=True)
class Framework:
    """A row of the table. Two figures in a pair are those of eager and of compiled execution, unless said otherwise.

    Memory:

    - `states`: bytes per parameter by owner in mixed precision; `unsharded`: further bytes of gradients that every
      data-parallel rank stores; `keeps_gathered`: sharded parameters of a pipeline are gathered, and their gradients
      reduced, once per step instead of once per micro-batch.
    - `kept`: numbers that a layer keeps for backward, relative to those of `Model.layer_activations`, in attention and
      in the MLP; `fused`: what compiled kernels keep of them; `logits`: bytes kept per logit, 0 for those of the
      papers; `whole_inputs`: inputs of tensor-parallel matrix products that stay gathered, per layer, without a
      pipeline.
    - `selective`: with selective recomputation, the part of forward that is computed again, and the part of the
      activations that is kept.
    - `reserved`: peak memory, relative to the sum of what is stored, and further bytes; `usable`: the part of a device
      that this may fill; `retries`: above 90 % of the device, the allocator frees and allocates again in every step,
      which takes this many times as long as the step.

    Kernels and their launch:

    - `passes`: memory traffic of the operations between matrix products, relative to reading and writing each tensor
      once; `accumulated`: bytes moved per parameter to add up the gradients of a micro-batch; `loss`: bytes moved per
      logit; `stepped`: traffic of the optimizer, relative to reading and writing its states once.
    - `attention`: the rate of its fused attention, relative to that of the row of the accelerator; `scores`: bytes that
      eager attention moves per score in forward.
    - `host`: seconds to launch the kernels of a layer, forward and backward; `across`: further seconds for each
      tensor-parallel collective and node that it crosses; `straggle`: factor and exponent of the growth of both with
      the logarithm of the tensor-parallel ranks if a pipeline crosses nodes.

    Communication:

    - `reduced`: bytes of a gradient in a reduction; `bucket`: bytes of a message of a reduction (0: a layer);
      `regathered`: the time to gather parameters after the optimizer, relative to that of a collective.
    - `call`: seconds that a tensor-parallel collective costs besides its transfer, in split or delayed matrix products;
      `hidden`: the part of its transfer that overlaps with computation, without and with asynchronous tensor
      parallelism.
    - `sharding` (a row of the table of shardings) and `recompute`: what its runs use if nothing else is said.
    - `chunks`: stages of a pipeline rank, if the layout does not say; `balanced`: stages have equal costs with the
      head, instead of equal numbers of layers; `least_micro_batches`: whether a pipeline needs at least as many
      micro-batches as stages less one.

    `fitted`: whether published runs of it were fitted; `counts_recomputation`: whether the FLOP/s that it reports count
    full recomputation (Narayanan et al. 2021, appendix).
    """

    name: str
    title: str
    source: str
    states: Mapping[str, float] = field(default_factory=lambda: RECIPES["mixed"], hash=False)
    unsharded: float = 0.0
    reduced: float = 2.0
    bucket: float = 0.0
    regathered: float = 1.0
    host: tuple[float, float] = (1.5e-3, 0.6e-3)
    across: float = 0.0
    straggle: tuple[float, float] = (0.0, 1.0)
    passes: tuple[float, float] = (1.9, 1.2)
    accumulated: float = 0.0
    loss: tuple[float, float] = (32.0, 20.0)
    stepped: float = 1.0
    call: float = 20e-6
    hidden: tuple[float, float] = (0.0, 0.5)
    attention: float = 1.0
    scores: tuple[float, float] = (14.0, 14.0)
    kept: tuple[float, float] = (1.0, 1.0)
    fused: float = 1.0
    logits: float = 0.0
    whole_inputs: float = 0.0
    selective: tuple[float, float] = (0.05, 1.0)
    reserved: tuple[float, float] = (1.0, 0.0)
    usable: float = USABLE
    retries: float = 0.0
    chunks: int = 1
    balanced: bool = False
    least_micro_batches: bool = False
    keeps_gathered: bool = False
    sharding: str = "ddp"
    recompute: str = "none"
    fitted: bool = False
    counts_recomputation: bool = False


FSDP_STATES = {"parameters": 4, "gradients": 4, "optimizer": 8}  # 32-bit shards; parameters are gathered in 16 bits
PURE_STATES = {"parameters": 2, "gradients": 2, "optimizer": 4}  # everything in 16 bits
_TORCHTUNE = Framework(
    "torchtune",
    "torchtune",
    "pytorch/torchtune: full fine-tuning in 16 bits; times and activations are fitted to its README",
    states=PURE_STATES,
    passes=(3.0, 0.8),
    fused=0.75,
    sharding="fsdp",
    recompute="full",
    fitted=True,
)

FRAMEWORKS: dict[str, Framework] = {
    framework.name: framework
    for framework in (
        Framework("pytorch", "PyTorch", "the formulas of the papers named in model.py, memory.py and step.py"),
        Framework(
            "nanotron",
            "nanotron",
            "huggingface/nanotron: optim/gradient_accumulator.py, optim/zero.py, models/base.py,"
            " parallel/tensor_parallel/functional.py; times and activations are fitted to the Ultra-Scale Playbook",
            states={"parameters": 2, "gradients": 4, "optimizer": 12},
            unsharded=1.5,
            reduced=4,
            bucket=52e6,
            regathered=3.0,
            host=(4.3e-3, 4.3e-3),
            across=0.36e-3,
            straggle=(0.82, 1.3),
            passes=(1.35, 1.35),
            accumulated=10,
            loss=(26.0, 26.0),
            stepped=4.0,
            call=52e-6,
            kept=(1.6, 1.15),
            logits=11,
            whole_inputs=1.85,
            reserved=(1.0, 0.33 * 2**30),
            usable=0.94,
            retries=2.0,
            balanced=True,
            least_micro_batches=True,
            fitted=True,
        ),
        Framework(
            "torchtitan",
            "torchtitan",
            "pytorch/torchtitan: FSDP2 with 32-bit shards and reductions, selective recomputation of every second"
            " matrix product; times and activations are fitted to its benchmarks",
            states=FSDP_STATES,
            reduced=4,
            passes=(1.85, 1.2),
            attention=1.12,
            fused=0.9,
            selective=(0.39, 0.4),
            reserved=(1.05, 0.0),
            usable=0.96,
            keeps_gathered=True,
            fitted=True,
            sharding="fsdp",
        ),
        Framework(
            "megatron",
            "Megatron-LM",
            "NVIDIA/Megatron-LM: selective recomputation of the matrices of attention (Korthikanti et al. 2022)",
            reduced=4,
            host=(1.5e-3, 1.5e-3),
            keeps_gathered=True,
            fitted=True,
            counts_recomputation=True,
        ),
        Framework(
            "llama3",
            "Meta's trainer of Llama 3",
            "The Llama 3 Herd of Models, 2024, section 3.3.2: interleaved stages of a layer, gradients in 32 bits",
            states=FSDP_STATES,
            reduced=4,
            chunks=8,
            keeps_gathered=True,
        ),
        Framework(
            "llm-foundry",
            "LLM Foundry",
            "mosaicml/llm-foundry: Composer with FSDP, 32-bit shards and reductions; times are fitted to its"
            " benchmarks",
            states=FSDP_STATES,
            reduced=4,
            passes=(1.91, 1.2),
            logits=6,
            usable=0.95,
            fitted=True,
            sharding="fsdp",
        ),
        Framework(
            "fms-fsdp",
            "fms-fsdp",
            "foundation-model-stack/fms-fsdp: compiled, FSDP with 16-bit parameters and states",
            states=PURE_STATES,
            passes=(1.9, 1.6),
            selective=(0.33, 0.67),
            sharding="fsdp",
        ),
        _TORCHTUNE,
        replace(
            _TORCHTUNE,
            name="torchtune-step-in-backward",
            title="torchtune, optimizer step in backward",
            states={**PURE_STATES, "gradients": 0.5},
        ),
        replace(
            _TORCHTUNE,
            name="torchtune-8bit",
            title="torchtune, optimizer step in backward, 8-bit AdamW",
            states={**PURE_STATES, "gradients": 0.5, "optimizer": 2},
        ),
        Framework(
            "litgpt",
            "LitGPT",
            "Lightning-AI/litgpt: FSDP with 32-bit shards",
            states=FSDP_STATES,
            reduced=4,
            sharding="fsdp",
        ),
        Framework(
            "deepspeed",
            "DeepSpeed",
            "microsoft/DeepSpeed: ZeRO in 16 bits with 32-bit states, alone or with Megatron-LM",
            sharding="zero1",
            counts_recomputation=True,
        ),
        Framework(
            "nanogpt",
            "nanoGPT",
            "karpathy/nanoGPT: autocast of 32-bit parameters; bytes of attention and passes are fitted to its README",
            states=FSDP_STATES,
            reduced=4,
            passes=(9.0, 4.8),
            scores=(75, 32),
            fitted=True,
        ),
        Framework(
            "olmo", "OLMo", "allenai/OLMo: FSDP with 32-bit shards", states=FSDP_STATES, reduced=4, sharding="fsdp"
        ),
    )
}
DEFAULT_FRAMEWORK = "pytorch"
