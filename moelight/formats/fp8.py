"""FP8: E4M3 codes times scales, of blocks, rows or all of a matrix."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from moelight.formats.format import Format
from moelight.formats.mxfp4 import mxfp4
from moelight.formats.rules import MAX_GROUP, TORCHAO_NAMES, FormatRow, ModuleRule, Scheme, Settings, all_but_ignored
from moelight.formats.scaled import ScaledFormat, scheme_fields


@dataclass(frozen=True, kw_only=True, slots=True)
class FP8Format(ScaledFormat):
    """E4M3 codes."""

    key = "fp8"

    codes: str = "F8_E4M3"

    @property
    def int8_reason(self) -> str | None:
        return f"{self.name}, whose numbers are no integers times scales, as int8 activations need them"

    def stack_format(self, exists: Callable[[str], bool]) -> Format | None:
        scales = next((suffix for suffix in ("_scale_inv", "_scale") if exists(suffix)), None)
        return None if scales is None else replace(self, names=("", scales, ""))


def fp8(*, block: tuple[int, int], scale: str, suffix: str = ".weight_scale_inv") -> FP8Format:
    """E4M3 values times a scale for each ``block`` of (rows, columns); 0: all of them."""
    described = {(1, 0): " per channel", (0, 0): " per tensor"}.get(block, f" in blocks of {block[0]}x{block[1]}")
    return FP8Format(
        name=f"FP8{described}",
        scale=scale,
        group_rows=block[0],
        group=block[1],
        names=(".weight", suffix, ".weight_zero_point"),
    )


def _scheme(scheme: Scheme) -> Format:
    return FP8Format(name=f"FP8 {scheme.described}", **scheme_fields(scheme))


def _rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    """Yield the rules of transformers' fine-grained FP8, and of DeepSeek, whose routed experts may be MXFP4."""
    settings.only(("fmt", "weight_fmt"), ("e4m3", "float8_e4m3fn"))
    experts = settings.only(("expert_dtype",), ("fp8", "fp4"))
    scale = "F8_E8M0" if settings.only(("scale_fmt",), ("float", "ue8m0")) == "ue8m0" else "F32"
    block = settings.values.get("weight_block_size")
    stored = fp8(block=(0, 0), scale=scale, suffix=".weight_scale")
    if block is not None:
        sizes = isinstance(block, list) and len(block) == 2
        if not sizes or not all(type(size) is int and 1 <= size <= MAX_GROUP for size in block):
            raise ValueError("weight_block_size there must be a list of two sizes")
        stored = fp8(block=(block[0], block[1]), scale=scale)
    if experts == "fp4":  # routed ones; shared experts are as the rest
        yield ModuleRule(re.compile(r"(?:.*\.)?experts\.\d+\..*"), mxfp4((".weight", ".scale")))
    yield from all_but_ignored(settings, stored)


def _fbgemm_rules(settings: Settings, _: str) -> Iterable[ModuleRule]:
    return all_but_ignored(settings, fp8(block=(1, 0), scale="F32", suffix=".weight_scale"))


ROW = FormatRow(
    format=FP8Format,
    suffixes=(
        *(".weight", ".weight_scale", ".weight_scale_inv", ".weight_zero_point", "_scale", "_scale_inv", ".scale"),
        *TORCHAO_NAMES,
    ),
    methods={"fp8": _rules, "fbgemm_fp8": _fbgemm_rules},
    schemes=dict.fromkeys(
        (("float-quantized", True), ("naive-quantized", True), ("int-quantized", True)),
        _scheme,
    ),
)
