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


NATIVE_OPERATIONS = ("gqa_decode", "kv_append")
TORCH_OPERATIONS = ("prefill_attention", "rms_norm", "rotary", "route_topk")
TORCH_PRODUCTS = ("linear", "expert_ffn")


def serving() -> list[Serving]:
    """Every operation of the CPU with the implementation that serves it in this process."""
    implementation = f"native {native.isa()}" if native.available() else "torch"
    rows = [
        Serving(operation=name, implementation=implementation, reason=native.reason()) for name in NATIVE_OPERATIONS
    ]
    unwritten = "no native kernel is written for it yet"
    products = (
        "bfloat16 weights are multiplied as they are"
        if native.has_fast_bfloat16()
        else "16-bit weights widened from 64 rows on"
    )
    return [
        *rows,
        *(Serving(operation=name, implementation="torch", reason=unwritten) for name in TORCH_OPERATIONS),
        *(Serving(operation=name, implementation="torch", reason=products) for name in TORCH_PRODUCTS),
    ]
