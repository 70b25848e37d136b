"""Implementation selected for each operation on this machine, with the reason: the table of `moelight doctor`.

Imports neither torch nor any kernel.
"""

from dataclasses import dataclass

from moelight.kernels import native


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """One row: the `implementation` of `operation`, and the `reason` for it."""

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
    "copy_pages",
    "file_reads",
)
NATIVE_OPERATIONS = PRODUCTS + OTHERS
_UNITS = {
    "pairs": "bfloat16 in pairs (AVX512_BF16, AVX512_VNNI)",
    "tiles": "bfloat16 in tiles (AMX)",
    "wide": "bfloat16 is widened to float32",
}


def serving() -> list[Serving]:
    """Every operation of the CPU with its implementation in this process."""
    implementation = f"native {native.isa()}" if native.available() else "torch"
    units = _UNITS.get(native.bf16_products() or "")
    reasons = dict.fromkeys(NATIVE_OPERATIONS, native.reason())
    if units is not None:
        reasons |= dict.fromkeys(PRODUCTS, f"{native.reason()}; {units}")
    return [Serving(operation=name, implementation=implementation, reason=why) for name, why in reasons.items()]
