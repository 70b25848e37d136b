"""Which implementation serves which operation on this machine, and why: the table behind `moelight doctor`.

Knows names and reasons only. Imports neither torch nor any kernel.
"""

from dataclasses import dataclass

from moelight.kernels import native


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """One row: `implementation` serves `operation`, because of `reason`."""

    operation: str
    implementation: str
    reason: str


# Those that multiply bfloat16 have units of their own for it on some processors.
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
    """Every operation of the CPU with the implementation that serves it in this process."""
    implementation = f"native {native.isa()}" if native.available() else "torch"
    units = _UNITS.get(native.bf16_products() or "")
    reasons = dict.fromkeys(NATIVE_OPERATIONS, native.reason())
    if units is not None:
        reasons |= dict.fromkeys(PRODUCTS, f"{native.reason()}; {units}")
    return [Serving(operation=name, implementation=implementation, reason=why) for name, why in reasons.items()]
