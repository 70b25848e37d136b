"""Compiles the GPU's kernels for cards that need not be here, and prints what came out as JSON; not a test.

`python -m tests.kernels.compile_gpu 75,80,90 whole`, in a process where Triton does not interpret. `few` instead of
`whole`: one variant of each kernel with products, in seconds. Programs that `compiled.json` records are not compiled
again: a record is keyed by everything that determines its program (`record_key`). `--record` writes what was compiled
into the record (`make compiled`); with `--anew` all programs are.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from moelight.kernels import norm
from moelight.kernels.gpu import (
    attention,
    attention_triton,
    grouped_triton,
    integers_triton,
    programs,
    quantized_triton,
    rows_triton,
    serving,
    tiles,
)
from moelight.kernels.gpu.integers import RoundedRows
from moelight.kernels.gpu.pages import ExpertTable
from tests.kernels.quantized import FORMATS, matrix

HIDDEN, WIDTH, EXPERTS, ROWS = 256, 512, 4, 64
RECORD = Path(__file__).parent / "compiled.json"
# Instructions that are counted in a program, the columns of a record after its sizes.
INSTRUCTIONS = ("mma.sync", "wgmma", "tcgen05.mma", "cp.async", "ld.global.v4", "fma.rn.f32")
SIZES = ("shared", "registers", "spilled")
records: dict[str, list[int]] = {}  # by `record_key`: recorded ones, and those of this run
asked: set[str] = set()  # keys of this run
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int8: "i8"}
NAMES |= {torch.int32: "i32", torch.int64: "i64"}
# Those of `tests.kernels.quantized.FORMATS` whose products are compiled: every kind, and every layout of ggml's blocks.
QUANTISED = ("packed int4", "packed int4 short", "fp8 blocks", "int8 groups", "mxfp4", "gptq int4", "awq")
# And with rows rounded to int8: every kind, sums of either sort, groups of 32 to 256.
INTEGERS = ("packed int4", "packed int8", "gptq int4 in order", "awq rows", "mxfp4", "Q8_0", "Q4_0", "Q5_1", "Q4_K")
INTEGERS += ("Q6_K",)
QUANTISED += ("Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS", "IQ4_NL", "MXFP4")
QUANTISED += ("TQ1_0", "IQ2_XXS", "IQ3_S", "IQ1_M", "nvfp4", "nf4", "mlx int4")


def experts(dtype: torch.dtype) -> ExpertTable:
    """Pages of a layer of floats whose sizes are multiples of 16."""
    shapes = ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
    return ExpertTable.of(*([torch.empty(shape, dtype=dtype)] * EXPERTS for shape in shapes))


def quantised_experts(form: str, activations: str = "auto") -> ExpertTable:
    """Pages of quantised matrices, of sizes that groups divide."""
    stored = FORMATS[form]
    gate_up, down = matrix(stored, 2 * WIDTH, HIDDEN), matrix(stored, HIDDEN, WIDTH)
    return ExpertTable.of([gate_up] * EXPERTS, [down] * EXPERTS, activations=activations)


def facts(
    label: str,
    card: int,
    kernel: Any,
    arguments: tuple[Any, ...],
    constants: dict[str, Any],
    unaligned: tuple[str, ...] = (),
    **options: int,
) -> dict[str, Any]:
    """What the launch of ``kernel`` with these would compile to: its shared memory, registers, bytes of registers that
    spill, and which instructions are there. Sizes and addresses, but those of ``unaligned``, are multiples of 16; a
    step of one is a constant, as it is in a launch."""
    signature, divisible = {}, {}
    constants = constants | {
        name: value
        for name, value in zip(kernel.arg_names, arguments, strict=False)
        if type(value) is int and value == 1 and name not in kernel.do_not_specialize
    }
    for position, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if name not in unaligned and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            divisible[(position,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    key = record_key(source, card, options)
    asked.add(key)
    if key not in records:
        records[key] = compile_program(source, card, options)
    return {"what": label, "card": card, **dict(zip((*SIZES, *INSTRUCTIONS), records[key], strict=True))}


def record_key(source: ASTSource, card: int, options: dict[str, int]) -> str:
    """Triton's own hash of a program's source, its callees, signature and constants, with the versions, the card and
    the launch options; not of the lines on which functions stand in their files."""
    for module in (attention_triton, grouped_triton, integers_triton, quantized_triton, rows_triton):
        for function in vars(module).values():
            if isinstance(function, triton.JITFunction):
                function.starting_line_number = 0
    parts = (triton.__version__, source.hash(), card, sorted(options.items()), SIZES, INSTRUCTIONS)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:24]


def compile_program(source: ASTSource, card: int, options: dict[str, int]) -> list[int]:
    """Compile, and return the values of `SIZES` and `INSTRUCTIONS`."""
    with contextlib.redirect_stdout(io.StringIO()) as log:  # of ptxas
        program = triton.compile(source, target=GPUTarget("cuda", card, 32), options=options)
    sizes = [
        int(re.search(pattern, log.getvalue()).group(1))
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    ]
    code = program.asm["ptx"]
    return [program.metadata.shared, *sizes, *(code.count(instruction) for instruction in INSTRUCTIONS)]


def products(card: int) -> list[dict[str, Any]]:
    """Both products in every format: for many rows in either 16-bit dtype, for few in float16, and in float32. Each
    product meets each dtype, and where it has many rows, which need most registers and
    shared memory, each format too."""
    rows = []
    for number, form in enumerate(("float", *QUANTISED)):
        turned = number % 2 == 0
        parts = ("down", "gate_up") if turned else ("gate_up", "down")
        cases = [(torch.float16, 4, parts[0])]
        if card >= 80:
            cases += [(torch.float16, 512, parts[0]), (torch.bfloat16, 512, parts[1])]
        if form in ("float", *QUANTISED[:2]):
            cases += [(torch.float32, mean_rows, parts[0]) for mean_rows in ((4, 512) if card >= 80 else (4,))]
        for dtype, mean_rows, part in cases:
            rows.append(product(card, dtype, form, part, mean_rows))
    mixed = [(4, "gate_up", False), (4, "down", True)]
    mixed += [(512, "gate_up", False), (512, "down", False)] if card >= 80 else [(4, "down", False)]
    for mean_rows, part, wide in mixed:
        rows.append(product(card, torch.float16, "float", part, mean_rows, torch.bfloat16, wide=wide))
    return rows


def product(
    card: int,
    dtype: torch.dtype,
    form: str,
    part: str,
    mean_rows: int,
    stored: torch.dtype | None = None,
    *,
    wide: bool = False,
) -> dict[str, Any]:
    """One product of ``mean_rows`` rows an expert; in mixed precision if floats are ``stored`` in another dtype."""
    quantised = form in QUANTISED
    pages = quantised_experts(form) if quantised else experts(stored or dtype)
    inputs, outputs = (HIDDEN, WIDTH) if part == "gate_up" else (WIDTH, HIDDEN)
    result = dtype if stored is None or part == "gate_up" else torch.float32
    x, out = torch.empty(ROWS, inputs, dtype=dtype), torch.empty(ROWS, outputs, dtype=result)
    tile = tiles.choose(
        divmod(card, 10),
        itemsize=4 if wide else dtype.itemsize,
        mean_rows=mean_rows,
        matrices=2 if part == "gate_up" else 1,
        unpacks=quantised,
    )
    slots = torch.empty((16, 3), dtype=torch.int32)
    tokens = torch.empty(ROWS, dtype=torch.int64) if part == "gate_up" else None
    arguments, constants = programs.arguments_of(
        pages, part, x, out, slots, tokens, tile, pages.activation, 0.5 if stored else 1.0, wide=wide
    )
    how = replace(constants["HOW"], product=serving.triton_dtype(torch.float32 if wide else dtype), by_hand=False)
    label = f"{'fp32' if wide else NAMES[dtype]} {NAMES[stored] if stored else form} {part} {mean_rows}"
    return facts(label, card, grouped_triton.grouped, arguments, constants | {"HOW": how}, **tiles.launch_options(tile))


def integer_products(card: int) -> list[dict[str, Any]]:
    """Both products of rows rounded to int8, of few rows and of many in either 16-bit dtype; none for cards that refuse
    them."""
    if not serving.card_serves_integers(divmod(card, 10))[0]:
        return []
    return [
        integer_product(card, torch.float16 if mean_rows < 64 else torch.bfloat16, form, part, mean_rows)
        for form in INTEGERS
        for part in ("gate_up", "down")
        for mean_rows in (4, 32, 512)
    ]


def integer_product(card: int, dtype: torch.dtype, form: str, part: str, mean_rows: int) -> dict[str, Any]:
    pages = quantised_experts(form, "int8")
    inputs, outputs = (HIDDEN, WIDTH) if part == "gate_up" else (WIDTH, HIDDEN)
    stored, out = pages.forms[part].stored, torch.empty(ROWS, outputs, dtype=dtype)
    x = RoundedRows.empty(ROWS, inputs, stored, out.device)
    matrices = 2 if part == "gate_up" else 1
    sizes = {"group": x.group, "mean_rows": mean_rows, "matrices": matrices, "scattered": stored.scattered}
    tile = tiles.choose_integers(divmod(card, 10), **sizes)
    slots = torch.empty((16, 3), dtype=torch.int32)
    tokens = torch.empty(ROWS, dtype=torch.int64) if part == "gate_up" else None
    arguments, constants = programs.arguments_of(pages, part, x, out, slots, tokens, tile, pages.activation)
    constants["HOW"] = replace(constants["HOW"], by_hand=False)
    label = f"int8 {NAMES[dtype]} {form} {part} {mean_rows}"
    return facts(label, card, grouped_triton.grouped, arguments, constants, **tiles.launch_options(tile))


def attentions(card: int) -> list[dict[str, Any]]:
    """Both forms: plain, of wide heads, with every option over int8, and in float32."""
    half = torch.bfloat16 if card >= 80 else torch.float16
    cases = [(half, 128, 4, ""), (torch.float16, 128, 4, ""), (torch.float16, 256, 2, ""), (half, 128, 4, "int8 ")]
    cases.append((torch.float32, 128, 4, ""))
    return [
        attend(card, dtype, head_dim, group, decodes=decodes, options=options)
        for dtype, head_dim, group, options in dict.fromkeys(cases)  # what was compiled before leaves no log
        for decodes in (True, False)
    ]


def attend(card: int, dtype: torch.dtype, head_dim: int, group: int, *, decodes: bool, options: str) -> dict[str, Any]:
    """One form over both tiers; with "int8" also with a window, sinks and a cap."""
    every = bool(options)
    q, new = torch.empty(4, 2 * group, head_dim, dtype=dtype), torch.empty(4, 2, head_dim, dtype=dtype)
    pool = torch.empty(32, 2, 2, head_dim, dtype=torch.int8 if every else dtype)
    scales = torch.empty(32, 2, 2) if every else None
    padded = 1 << (head_dim - 1).bit_length()
    tile = tiles.choose_attention(
        divmod(card, 10), itemsize=dtype.itemsize, head_dim=padded, group=group, decodes=decodes
    )
    form = attention.PromptForm(tile_tokens=16, most_tokens=100)
    batch = attention.RaggedBatch([1, 3], [20, 0], [0, 0], [0, 16], decoding=1, block_size=16, form=form)
    rest = {"window": 16 if every else None, "sinks": torch.empty(2 * group) if every else None}
    rest |= {"softcap": 30.0 if every else None, "cache": pool, "buffer": pool, "cache_scale": scales}
    arguments, constants = attention.attention_arguments(
        q, new, new, batch, 0.1, tile, decodes=decodes, **rest, buffer_scale=scales, out=q
    )
    constants |= {"PRODUCT": serving.triton_dtype(dtype), "BY_HAND": False}
    label = f"{NAMES[dtype]} attention {options}{'decode' if decodes else 'prompt'} {head_dim}"
    return facts(
        label,
        card,
        attention_triton.attend,
        arguments,
        constants,
        unaligned=("sequences", "tiles", "entries"),
        **tiles.launch_options(tile),
    )


def others(card: int) -> list[dict[str, Any]]:
    """The sorting of rows, the map of slots, the router, the weighted sum, norms and heads, new keys and values into a
    cache, and transfers."""
    i32, i64 = torch.empty(16, dtype=torch.int32), torch.empty(16, dtype=torch.int64)
    half, single = torch.empty(16, dtype=torch.float16), torch.empty(16)
    result: dict[str, tuple[Any, ...]] = {
        "map": (grouped_triton.map_slots, (i32, i32, i32, 5, 9, 40, 11), {"BM": 16, "PADDED": 128, "SLOTS": 32}),
        "sort": (rows_triton.sort_rows, (i32, i64, i64, i32, 40), {"TOP_K": 8, "BR": 1024}),
        "route": (
            rows_triton.route,
            (half, single, i32, 40, 60, 60),
            {"TOP_K": 2, "NORMALIZE": True, "NARROW": True, "BY_HAND": False, "BT": 32, "PADDED": 64},
        ),
        "combine": (
            rows_triton.combine,
            (half, single, i64, single, half, 40, 1, 1500),
            {"TOP_K": 4, "BEGUN": True, "ADD": True, "BY_HAND": False, "BW": 1024},
        ),
    }
    codes = torch.empty(16, dtype=torch.int8)
    heads = {"PICKED": True, "INT8": True, "D": 128, "BD": 128, "BH": 16}
    result["append int8"] = (attention_triton.append, (half, half, codes, single, i64, i64, 1024, 1024, 16), heads)
    both = {"BY_HAND": False, "D": 128, "BD": 128, "BH": 16}
    result["through int8"] = (attention_triton.through_int8, (half, half, half, half, 1024, 1024, 16), both)
    heads = heads | {"INT8": False, "BH": 64}
    result["append"] = (attention_triton.append, (half, half, half, half, i64, i64, 8192, 8192, 64), heads)
    for sums, dtype, group in (("", torch.int32, 128), ("groups", torch.int32, 32), ("parts", torch.float16, 256)):
        inputs = (half, i64, codes, single, torch.empty(16, dtype=dtype), 16, 4096, 4096, 4096 // group)
        flags = {"GATHERED": sums == "groups", "SUMS": sums, "G": group, "COUNT": 4096 // group}
        result[f"round {sums}"] = (integers_triton.round_rows, inputs, flags)
    result["fetch"] = (attention_triton.fetch, (i32, i32, i32, 40, 1024), {"BW": 4096})
    unaligned = ("rows", "slots", "pieces", "count")
    rows = [facts(name, card, *rest, unaligned=unaligned) for name, rest in result.items()]
    for dtype in (torch.float16, torch.float32, *((torch.bfloat16,) if card >= 80 else ())):
        x, name = torch.empty(16, dtype=dtype), NAMES[dtype]
        for width in (128, 16384) if dtype == torch.float16 else (16384,):
            padded = 1 << (width - 1).bit_length()
            inputs = (x, x, x, x, x, width, width, width, width, 1e-5)
            constants = {"ADD": width != 128, "ONCE": False, "WATCHED": False, "BY_HAND": False, "PADDED": padded}
            how = norm.launch_options(padded)
            rows.append(facts(f"norm {name} {width}", card, rows_triton.rms_norm, inputs, constants, **how))
        inputs = (x, x, x, x, x, 48, 32, 40, 128, 6144, 128, 8.0, 1e-5)
        constants = {"CLIP": True, "NORM": True, "MIXED": False, "BY_HAND": False, "BH": 16, "PADDED": 64}
        how = norm.launch_options(2048)
        rows.append(facts(f"heads {name}", card, rows_triton.finish_heads, inputs, constants, **how))
    return rows + mixed(card)


def mixed(card: int) -> list[dict[str, Any]]:
    """Norms and heads in mixed precision, with weights that float16 holds and others."""
    rows, half, single = [], torch.empty(16, dtype=torch.float16), torch.empty(16)
    for weight in (half, half.bfloat16()):
        name = NAMES[weight.dtype]
        inputs = (single, half, weight, half, single, 4096, 4096, 4096, 4096, 1e-5)
        flags = {"ADD": True, "ONCE": True, "WATCHED": True, "BY_HAND": False, "PADDED": 4096}
        how = norm.launch_options(4096)
        rows.append(facts(f"mixed norm {name}", card, rows_triton.rms_norm, inputs, flags, ("finite",), **how))
        inputs = (half, half, half, weight, weight, 48, 32, 40, 128, 6144, 128, 8.0, 1e-5)
        flags = {"CLIP": True, "NORM": True, "MIXED": True, "BY_HAND": False, "BH": 16, "PADDED": 64}
        how = norm.launch_options(2048)
        rows.append(facts(f"mixed heads {name}", card, rows_triton.finish_heads, inputs, flags, **how))
    return rows


def compiled(card: int, *, full: bool) -> list[dict[str, Any]]:
    """``full``: every kernel in every format; else products of experts and attention of decoding, one format each."""
    if full:
        return others(card) + attentions(card) + products(card) + integer_products(card)
    some = [product(card, torch.float16, form, "gate_up", 512) for form in ("float", "packed int4", "Q4_K")]
    some.append(product(card, torch.float16, "fp8 blocks", "down", 512))
    if serving.card_serves_integers(divmod(card, 10))[0]:
        some += [
            integer_product(card, torch.float16, *item, 512) for item in (("packed int4", "gate_up"), ("Q4_K", "down"))
        ]
    return [*some, attend(card, torch.float16, 128, 4, decodes=True, options="")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cards", type=lambda text: [int(card) for card in text.split(",")])
    parser.add_argument("variants", choices=("few", "whole"))
    parser.add_argument("--record", action="store_true", help="Write the record.")
    parser.add_argument("--anew", action="store_true", help="Compile recorded programs too.")
    arguments = parser.parse_args()
    triton.knobs.nvidia.dump_ptxas_log = True
    recorded = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not arguments.anew:
        records.update(recorded)
    rows = []
    for card in arguments.cards:
        rows += compiled(card, full=arguments.variants == "whole")
        if arguments.record:
            rows += compiled(card, full=False)
            print(f"{card}: {len(asked)} programs, {len(asked - set(recorded))} of them new", flush=True)
            RECORD.write_text(as_lines(recorded | records))
    if not arguments.record:
        print(json.dumps({"rows": rows, "compiled": len(records) - len(recorded)}))
    elif {75, 80, 86, 89, 90, 100} <= set(arguments.cards):
        RECORD.write_text(as_lines({key: records[key] for key in asked}))  # without those of programs that are no more


def as_lines(values: dict[str, list[int]]) -> str:
    """JSON with one record a line, in the order of keys."""
    lines = ",\n".join(f'"{key}": {json.dumps(values[key])}' for key in sorted(values))
    return f"{{\n{lines}\n}}\n"


if __name__ == "__main__":
    main()
