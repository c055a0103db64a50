"""Spec → script: assembles one standalone file from real functions, and computes the diff of two scripts.

The functions are copied as text, with their comments, from the modules of fault, strategy, workload, data set and base,
in this order: the first module that defines a name wins. An `if` whose condition depends only on settings of the Spec
is resolved at generation time: only the branch that is taken is written. Starting from `main`, the generator follows
every name that is used, so the script contains no unused code; a short function of the base or the workload that is
called once is written in place of its call; constants get the values of the Spec. No training code is imported here.
"""

from __future__ import annotations

import ast
import difflib
import math
import shlex
import subprocess
import textwrap
from functools import lru_cache
from typing import Any

from ruff.__main__ import find_ruff_bin

from labkit.common.arguments import check_type, shown
from labkit.common.units import counted
from labkit.plan import checkpoints
from labkit.plan.assembly import Assembly
from labkit.plan.modules import Code, read_module
from labkit.plan.spec import Spec, SpecError
from labkit.training.faults import FAULTS
from labkit.training.strategies import STRATEGIES

BASE = "labkit.training.strategies.base"
_INJECTIONS = {"INJECT_DATA": "fault_data", "INJECT_MODEL": "fault_model", "INJECT_STEP": "fault_step"}
_DTYPES = {"bf16": Code("torch.bfloat16"), "fp16": Code("torch.float16")}  # the types of mixed precision
_PRINTED, _PRINT_EVERY = 5, 20  # a script prints at least so many losses, and one at least every so many steps
_START = '\n\nif __name__ == "__main__":\n    main()\n'


def write_script(spec: Spec, in_place: bool = True) -> str:
    """The training script of a Spec, formatted by ruff. It needs torch and does not import labkit. Short functions are
    written in place of their only call, unless `in_place` is False.

    Raises `SpecError` if the number of ranks is not set (`Spec.on` sets it), or if the Spec names a user's script.
    """
    check_type("spec", spec, Spec, "a Spec such as Spec('ddp', nproc=2)")
    if spec.script is not None:
        raise SpecError(
            "script", f"{spec.script} is your own script, and only strategies have a generated one; name a strategy"
        )
    if spec.nproc is None:
        raise SpecError("nproc", "the script depends on the number of ranks, which is not set; add --nproc")
    modules = (*_fault_module(spec), spec.strategy_row.module, spec.workload_row.module, spec.data_row.module, BASE)
    assembly = Assembly([read_module(module) for module in modules], settings(spec))
    assembly.follow("main", read_module(BASE))
    if in_place:
        assembly.write_short_in_place()
    parts = [_docstring(spec), assembly.imports(), assembly.constants(_notes(spec)), *assembly.program()]
    return _formatted("\n\n".join(parts) + _START)


def diff_scripts(a: Spec, b: Spec) -> str:
    """The unified diff of the scripts of two Specs; empty if the scripts are equal."""
    for name, spec in (("a", a), ("b", b)):
        check_type(name, spec, Spec, "a Spec such as Spec('ddp', nproc=2)")
    old, new = write_script(a).splitlines(), write_script(b).splitlines()
    lines = difflib.unified_diff(old, new, f"{a.name}/train.py", f"{b.name}/train.py", lineterm="")
    return "".join(f"{line}\n" for line in lines)


def excerpt(spec: Spec, *names: str) -> str:
    """The source of functions, classes or constants of a Spec's script, in the order of `names`.

    Raises `SpecError` as `write_script` does, and `LookupError` for a name that the script does not define.
    """
    if not names:
        raise LookupError(
            "excerpt needs the name of at least one function, class or constant, such as excerpt(spec, 'train_step')"
        )
    source = write_script(spec)
    parts = {
        name: part for node in ast.parse(source).body for name in _defined(node) for part in [_segment(source, node)]
    }
    unknown = [name for name in names if not isinstance(name, str) or name not in parts]
    if unknown:
        raise LookupError(f"the script of {spec.name} defines no {shown(unknown[0])}; it defines {', '.join(parts)}")
    return "\n\n".join(parts[name] for name in names) + "\n"


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    return [target.id for target in getattr(node, "targets", ()) if isinstance(target, ast.Name)]


def _segment(source: str, node: ast.stmt) -> str:
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "\n".join(source.splitlines()[first - 1 : node.end_lineno])


def command(spec: Spec) -> str:
    """The command that runs the script by hand on one machine."""
    ranks = 1 if spec.nproc is None else spec.processes
    what = ["train.py"] if spec.script is None else [*(["-m"] if spec.as_module else []), spec.script, *spec.args]
    return shlex.join(["torchrun", "--standalone", f"--nproc-per-node={ranks}", *what])


def settings(spec: Spec) -> dict[str, Any]:
    """The constants that a Spec sets, by name; a script contains the ones that it uses."""
    # Options of other strategies keep their default, so that conditions on them are resolved and removed.
    values = {option.name.upper(): option.default for row in STRATEGIES.values() for option in row.options}
    request = spec.request
    values |= {
        "SEED": spec.seed,
        "EPOCHS": spec.epochs or math.ceil(request.total_steps / spec.steps_per_epoch),
        "MAX_STEPS": spec.steps,
        "BATCH_PER_RANK": spec.batch_per_rank,
        "SAMPLES": spec.train_samples,
        "SAVE_EVERY": spec.save_every or 0,
        "CHECKPOINT_ASYNC": spec.checkpoint_async,
        "RESUME": spec.resume,
        "READS": spec.strategy_row.reads,
        "MANIFEST": checkpoints.identity(request),
        "FAULT": spec.fault,
        "FAULT_RANK": spec.processes - 1,
        **{setting: name in _fault_definitions(spec) for setting, name in _INJECTIONS.items()},
        "REPORTS": read_module(spec.workload_row.module).has("report"),
        "STAGE_DATA": read_module(spec.strategy_row.module).has("stage_data"),
        "DISTRIBUTED": spec.strategy_row.process_group,
        "TF32": spec.precision == "tf32",
        "AUTOCAST": spec.strategy_row.autocast,
        "MIXED_PRECISION": spec.precision in _DTYPES,
        "DTYPE": _DTYPES.get(request.precision),
        "LOSS_SCALING": spec.precision == "fp16",
        "PRINT_EVERY": min(max(request.total_steps // _PRINTED, 1), _PRINT_EVERY),
        "DEVICE": "cuda" if spec.device == "cuda" else "cpu",
        "RANKS": spec.nproc,
        "DATA_RANKS": spec.data_ranks,
    }
    if spec.data_dir is not None:
        values["DATA_DIR"] = spec.data_dir
    values |= {name.upper(): value for name, value in spec.options.items()}
    return values | spec.workload_row.constants(spec.options) | spec.strategy_row.constants(request)


def _fault_module(spec: Spec) -> tuple[str, ...]:
    module = FAULTS[spec.fault].module if spec.fault else None
    return () if module is None else (module,)


def _fault_definitions(spec: Spec) -> set[str]:
    return {name for module in _fault_module(spec) for name in read_module(module).definitions}


def _notes(spec: Spec) -> dict[str, str]:
    """Comments that explain a constant by the Spec's arithmetic."""
    steps = f"{counted(spec.train_samples, 'sample')}: {counted(spec.steps_per_epoch, 'step')} per epoch"
    return {"BATCH_PER_RANK": f"× {spec.data_ranks} = {spec.global_batch} global; {steps}"}


def _docstring(spec: Spec) -> str:
    row, model, precision = spec.strategy_row, spec.workload_row.title.partition(":")[0], spec.precision or "fp32"
    entries = [("Splits", row.splits), ("Sends", row.sends), ("Note", row.note(spec.device))]
    if spec.fault:
        entries.append(("Fault", f"{FAULTS[spec.fault].title} (injected). {FAULTS[spec.fault].shows}"))
    lines = [
        textwrap.fill(text, 92, initial_indent=f"{name:7}", subsequent_indent=" " * 7) for name, text in entries if text
    ]
    return "\n".join([f'"""{model} on {spec.data}, {row.title}, {precision}: {command(spec)}\n', *lines, '"""'])


@lru_cache(maxsize=64)
def _formatted(source: str) -> str:
    argv = [find_ruff_bin(), "format", "--isolated", "--stdin-filename", "train.py", "-"]
    return subprocess.run(argv, input=source, capture_output=True, check=True, encoding="utf-8").stdout
