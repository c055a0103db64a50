"""Builds the library from `native/`, once for each version of its sources and of torch, into the user's cache.

Every function of CUDA that torch imports and the sources do not define gets a stub that reports success.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from cuda_stand_in.environment import CACHE, site_packages
from labkit.setup.environment import SetupError
from labkit.setup.progress import Progress

_NATIVE = Path(__file__).with_name("native")
_SOURCES = ("streams", "runtime", "cupti", "nccl")
_TORCH = ("libc10_cuda", "libtorch_cuda", "libtorch_python", "libtorch_cpu", "libtorch_cuda_linalg")
_OURS = re.compile(r"(cuda[A-Z]|__cuda|cublas|cudnn|nccl|cupti)")
_PRODUCT = re.compile(r"cublas\w*(gemm|Gemm|gemv|Dot|dot)")
_CREATES = re.compile(r"cudnnCreate|cublasCreate|cudnnBackendCreate")
# What the few functions of the driver that must answer something do; all others report success.
_DRIVER = {
    "cuDevicePrimaryCtxGetState": "*(int*)c = 1;",
    "cuCtxGetCurrent": "*(void**)a = (void*)8;",
    "cuDevicePrimaryCtxRetain": "*(void**)a = (void*)8;",
    "cuGetErrorString": '*(const char**)b = "error of the stand-in";',
}


def built(python: Path, progress: Progress) -> Path:
    """The folder of `libcudastandin.so`, `libcuda.so.1` and `libnvidia-ml.so.1` for the torch of `python`.

    Raises `SetupError` if a compiler is missing or fails.
    """
    packages = site_packages(python)
    digest = hashlib.sha256((packages / "torch" / "version.py").read_bytes() + Path(__file__).read_bytes())
    for path in sorted(path for path in _NATIVE.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    folder = CACHE / f"library-{digest.hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    for program in ("g++", "nm"):
        if not shutil.which(program):
            raise SetupError(f"{program} is missing, which builds the CUDA stand-in; install it (Debian: g++)")
    progress.step("building the CUDA stand-in")
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as place:
        _build(packages, Path(place))
        try:
            Path(place).rename(folder)
        except OSError:  # another process built it meanwhile
            if not folder.is_dir():
                raise
        Path(place).mkdir(exist_ok=True)  # for the end of the temporary folder
    folder.chmod(0o755)
    return folder


def _build(packages: Path, out: Path) -> None:
    headers = (_NATIVE / "headers", packages / "nvidia/cu13/include", packages / "nvidia/nccl/include")
    include = [f"-I{folder}" for folder in headers]
    objects = [out / f"{name}.o" for name in _SOURCES]
    for name, compiled in zip(_SOURCES, objects):
        _compile("-c", *include, str(_NATIVE / f"{name}.cpp"), "-o", str(compiled))
    defined = set().union(*(_symbols(compiled, r" [TW] (\w+)") for compiled in objects))
    imported: set[str] = set()
    for name in _TORCH:
        imported |= _symbols(packages / "torch" / "lib" / f"{name}.so", r" U (\w+)", "-D")
    stubs = [_stub(name) for name in sorted(imported - defined) if _OURS.match(name)]
    declared = 'extern "C" void stand_in_stub(const char*);\nextern "C" int stand_in_product(const char*);\n'
    (out / "stubs.cpp").write_text(declared + "\n".join(stubs), encoding="utf-8")
    _compile("-c", str(out / "stubs.cpp"), "-o", str(out / "stubs.o"))
    _link(out / "libcudastandin.so", *map(str, objects), str(out / "stubs.o"), "-lpthread")
    _link(out / "libnvidia-ml.so.1", str(_NATIVE / "nvml.cpp"))
    driver = _symbols(packages / "torch" / "lib" / "libcaffe2_nvrtc.so", r" U (cu[A-Z]\w+)", "-D")
    lines = [
        f'extern "C" int {name}(void* a, void* b, void* c) {{ {_DRIVER.get(name, "")} return 0; }}'
        for name in sorted(driver)
    ]
    (out / "driver.cpp").write_text("\n".join(lines), encoding="utf-8")
    _link(out / "libcuda.so.1", str(out / "driver.cpp"))


def _stub(name: str) -> str:
    """A function that does nothing but report its name, is a product of matrices, or creates a handle."""
    if _CREATES.match(name):
        body = "static char handle[64]; *(void**)a = handle; return 0;"
    elif _PRODUCT.match(name):
        body = f'return stand_in_product("{name}");'
    else:
        body = f'static bool said; if (!said) {{ said = true; stand_in_stub("{name}"); }} return 0;'
    return f'extern "C" long {name}(void* a) {{ {body} }}'


def _symbols(library: Path, pattern: str, *flags: str) -> set[str]:
    listed = subprocess.run(["nm", *flags, str(library)], capture_output=True, text=True, check=True).stdout
    return set(re.findall(pattern, listed))


def _link(library: Path, *arguments: str) -> None:
    _compile("-shared", f"-Wl,-soname,{library.name}", "-o", str(library), *arguments)


def _compile(*arguments: str) -> None:
    command = ["g++", "-std=c++17", "-O1", "-g", "-fPIC", "-w", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        raise SetupError(f"the CUDA stand-in does not compile:\n{done.stderr}")
