"""The compiled extension: availability, with the reason and the remedy, instruction set, and operations. Never imports
torch."""

import importlib
import shutil
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

_COMPILERS = ("c++", "g++", "clang++")  # that CMake looks for
_AGAIN = "install moelight again (pip install --force-reinstall --no-deps . in its source directory)"


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        extension = importlib.import_module("moelight.kernels._native")
    except ModuleNotFoundError:
        return None, "the extension was not built" if _installed() else "the installation of moelight is not complete"
    except ImportError as error:
        return None, f"the extension does not load: {' '.join(str(error).split())}"
    return extension, f"built, {extension.isa()} of {', '.join(extension.isa_available())}"


def _installed() -> bool:
    """False where the package is imported from a source directory whose installation never ended."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        version("moelight")
    except PackageNotFoundError:
        return False
    return True


def remedy() -> str:
    """Describe how to get native kernels in this process, in one clause; unused where `available` is true."""
    if not _installed():
        return "run the installation again (pip install . in the source directory of moelight, or make demo)"
    compiler = next((name for name in _COMPILERS if shutil.which(name) is not None), None)
    if compiler is None:
        return f"install a C++20 compiler (g++ 11 or clang 14 will do), then {_AGAIN}"
    return f"{_AGAIN}; {compiler} is there, and with --verbose pip shows why a build fails"


def extension() -> ModuleType | None:
    """The extension, loaded once; None if it is missing."""
    return _load()[0]


def available() -> bool:
    """True if native kernels are used in this process."""
    return extension() is not None


def on_cpu(tensor: Any) -> bool:
    """True if the CPU's kernels compute with ``tensor``, not a device's: the one place that decides so, wherever it
    lies (tests play a device in host memory)."""
    return bool(tensor.device.type == "cpu")


def reason() -> str:
    """The reason why native kernels are used, or why not, in one clause."""
    return _load()[1]


def isa() -> str | None:
    """Instruction set in use (`scalar`, `avx2`, `avx512`, `neon`); None without the extension."""
    native = extension()
    return None if native is None else str(native.isa())


def bf16_products() -> str | None:
    """Form of bfloat16 products (`wide`; under AVX-512 `pairs`, `tiles`, `halves`; under NEON `pairs`); None without
    the extension."""
    native = extension()
    return None if native is None else str(native.bf16_products())


def int8_products() -> str | None:
    """Form of products of int8 activations (`wide`, `dots`, `tiles`); None without the extension."""
    native = extension()
    return None if native is None else str(native.int8_products())


def cpu_features() -> dict[str, bool]:
    """Instruction-set extensions of this processor by name; empty without the extension."""
    native = extension()
    return {} if native is None else dict(native.cpu_features())


@cache
def has_tiles() -> bool:
    """True if the processor multiplies bfloat16 matrices in tiles (AMX); False if unknown."""
    return cpu_features().get("amx_bf16", False)


@cache
def has_fast_bfloat16() -> bool:
    """True if bfloat16 products are faster than float32 ones: in tiles, or on AMD's AVX-512 (4 to 5 times).

    Not on Intel's without tiles, whose dot product issues every other cycle (docs/log.md). False if unknown.
    """
    native = extension()
    amd = native is not None and native.cpu_vendor() == "AuthenticAMD"
    return has_tiles() or (amd and cpu_features().get("avx512_bf16", False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """The implementation of an operation, and the reason for it."""

    operation: str
    implementation: str
    reason: str


# Operations with bfloat16 products, for which some processors have special units.
PRODUCTS = ("gqa_decode", "prefill_attention", "linear", "expert_ffn")
OTHERS = (
    "mla_decode",
    "kv_append",
    "route",
    "sort_by_expert",
    "gather_rows",
    "scatter_sum",
    "rms_norm",
    "rotate",
    "causal_conv",
    "delta_rule",
    "copy_pages",
    "file_reads",
)
NATIVE_OPERATIONS = PRODUCTS + OTHERS
INT8_ACTIVATIONS = "int8_activations"  # of `linear` and `expert_ffn`
_UNITS = {
    "pairs": "bfloat16 in pairs (AVX512_BF16, AVX512_VNNI)",
    "tiles": "bfloat16 in tiles (AMX)",
    "halves": "bfloat16 in pairs, as two products of float32 (AVX512_BF16, AVX512_VNNI)",
    "wide": "bfloat16 is widened to float32",
}


def serving() -> list[Serving]:
    """Every operation of the CPU with its implementation in this process, and what is particular to it; `reason` says
    what holds of all."""
    implementation = f"native {isa()}" if available() else "torch"
    units = _UNITS.get(bf16_products() or "")
    operations: tuple[str, ...] = PRODUCTS
    if isa() == "neon" and bf16_products() == "pairs":
        units, operations = "bfloat16 in pairs (Arm's BF16)", ("linear", "expert_ffn")
    reasons = dict.fromkeys(NATIVE_OPERATIONS, "")
    if units is not None:
        reasons |= dict.fromkeys(operations, units)
    rows = [Serving(operation=name, implementation=implementation, reason=reason) for name, reason in reasons.items()]
    return [*rows, Serving(operation=INT8_ACTIVATIONS, implementation=implementation, reason=_int8_reason())]


def _int8_reason() -> str:
    if not available():
        return "`generate` refuses --activations int8"
    unit = {"avx512": "AVX512_VNNI", "avx2": "AVX_VNNI", "neon": "Arm's dotprod"}.get(isa() or "", "")
    dots = f"four products at a time ({unit})"
    by = {"wide": "products of words", "dots": dots, "tiles": "tiles (AMX), with few tokens " + dots}
    return by.get(int8_products() or "", "emulated tiles")
