"""`moelight.attach` on the bundled model: the same tokens under every policy, and how fast beside what else there is.

The model's experts are widened with zeros, which changes no routing and no token, until a page is worth a read from a
disk. Every run is of transformers' own ``generate``, on a CPU, in bfloat16; the disk is read past the page cache by
moelight, and put out of it before every step for accelerate.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.generation import StoppingCriteria

import moelight
from moelight.experts.policy import DEFAULT_POLICY, EVICTIONS, CacheRules, Capacity, ExpertPolicy, PerLayerRules

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "moelight" / "demo"
HELD_OUT = ROOT / "tests" / "demo" / "heldout.jsonl"
POLICIES = ROOT / "examples" / "policies"
PROMPTS, NEW_TOKENS = 32, 12
SHARE = 25.0  # percent of the experts that have room
EVEN = PerLayerRules(allocation="uniform", min_capacity=1)

Generate = Callable[[int], Tensor]


def figures(scratch: Path, *, batches: tuple[int, ...] = (1, 4), width: int = 4096, rounds: int = 3) -> dict[str, Any]:
    """``tokens``: for each policy whether all tokens of 32 ragged prompts are the untouched model's, its hit rate and
    bytes. ``speed``: decode tokens/s by batch size of the untouched model, attached with room for a quarter, and
    offloaded to disk by accelerate with room for as much; and attached with room for all."""
    model, prompts = wide_demo(width), ragged_prompts()
    return {
        "model": f"demo, experts {width} wide",
        "tokens": tokens_under_policies(model, prompts, scratch),
        "speed": speeds(model, prompts, scratch, batches, rounds),
    }


def wide_demo(width: int) -> PreTrainedModel:
    """The bundled model, each expert of ``width`` rows, all but its own zero."""
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.bfloat16).eval()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        gate, up = experts.gate_up_proj.detach().chunk(2, dim=1)
        count, old, hidden = gate.shape
        wide = torch.zeros(count, 2, width, hidden, dtype=gate.dtype)
        wide[:, 0, :old], wide[:, 1, :old] = gate, up
        down = torch.zeros(count, hidden, width, dtype=gate.dtype)
        down[..., :old] = experts.down_proj.detach()
        experts.gate_up_proj = torch.nn.Parameter(wide.view(count, 2 * width, hidden), requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        experts.intermediate_dim = width
    model.config.moe_intermediate_size = width
    return model


def ragged_prompts() -> dict[str, Tensor]:
    """Held-out prompts of the bundled model, padded on the left."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO, padding_side="left")
    rows = [json.loads(line) for line in HELD_OUT.read_text(encoding="utf-8").splitlines()[:PROMPTS]]
    batch = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def tokens_under_policies(model: PreTrainedModel, prompts: dict[str, Tensor], scratch: Path) -> list[dict[str, Any]]:
    """One row a policy: those of ``examples/policies``, and every eviction with room for a quarter."""
    wanted = _greedy(model, prompts)
    files: list[Path | ExpertPolicy] = sorted(POLICIES.glob("*.moe"))
    rows = []
    for policy in [
        *files,
        *(_quarter(eviction) for eviction in EVICTIONS),
        _quarter("lru", per_layer=EVEN),
        DEFAULT_POLICY,
    ]:
        with moelight.attach(model, policy, directory=scratch) as attached:
            same = torch.equal(_greedy(model, prompts), wanted)
            result = attached.get_stats()
        rows.append(
            {
                "policy": policy.stem if isinstance(policy, Path) else policy.name,
                "equal": same,
                "hit_rate": result["policy"]["cache"]["hit_rate"],
                "bytes": result["placement"]["bytes"],
            }
        )
    return rows


def speeds(
    model: PreTrainedModel, prompts: dict[str, Tensor], scratch: Path, batches: tuple[int, ...], rounds: int
) -> list[dict[str, Any]]:
    """One row a batch size: tokens/s of each contestant, the best of ``rounds``."""
    rows: dict[int, dict[str, Any]] = {batch: {"batch": batch} for batch in batches}

    def measure(name: str, generate: Generate) -> None:
        for batch, row in rows.items():
            row[name] = max(_rate(generate, batch) for _ in range(rounds))

    def plain(batch: int) -> Tensor:
        return _decode(model, prompts, batch)

    measure("untouched", plain)
    full = CacheRules(capacity=Capacity(value=100.0, unit="percent"))
    near = ExpertPolicy(name="all experts near", cache=full)
    for policy in (near, _quarter("lru"), _quarter("lru", per_layer=EVEN), DEFAULT_POLICY):
        with moelight.attach(model, policy, directory=scratch):
            measure(policy.name, plain)
    with offloaded(model, scratch) as decode:
        measure("accelerate", lambda batch: decode(prompts, batch))
    return list(rows.values())


@contextmanager
def offloaded(model: PreTrainedModel, scratch: Path) -> Iterator[Callable[[dict[str, Tensor], int], Tensor]]:
    """A copy of ``model`` with room for a quarter of its experts' layers, the rest on disk, by accelerate."""
    from accelerate import dispatch_model

    layers = len(model.model.layers)
    near = round(layers * SHARE / 100.0)
    device_map: dict[str, Any] = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    device_map["lm_head"] = "cpu"
    for layer in range(layers):
        for part in ("self_attn", "input_layernorm", "post_attention_layernorm", "mlp.gate", "mlp.experts"):
            away = part == "mlp.experts" and layer >= near
            device_map[f"model.layers.{layer}.{part}"] = "disk" if away else "cpu"
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        copy = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16).eval()
        copy.load_state_dict(model.state_dict())
        copy = dispatch_model(copy, device_map, main_device="cpu", offload_dir=folder, force_hooks=True)
        forget = [_Forget(Path(folder))]
        yield lambda prompts, batch: _decode(copy, prompts, batch, stopping_criteria=forget)


def _quarter(eviction: str, per_layer: PerLayerRules | None = None) -> ExpertPolicy:
    return ExpertPolicy(
        name=eviction if per_layer is None else f"{eviction}, layer by layer",
        cache=CacheRules(capacity=Capacity(value=SHARE, unit="percent"), eviction=(eviction,)),
        per_layer=per_layer,
    )


def _greedy(model: PreTrainedModel, prompts: dict[str, Tensor]) -> Tensor:
    return model.generate(**prompts, max_new_tokens=NEW_TOKENS, do_sample=False)


def _decode(model: PreTrainedModel, prompts: dict[str, Tensor], batch: int, **options: Any) -> Tensor:
    ours = {name: value[:batch] for name, value in prompts.items()}
    return model.generate(**ours, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False, **options)


def _rate(generate: Generate, batch: int) -> float:
    """Generated tokens a second, prompts included."""
    began = time.perf_counter()
    generate(batch)
    return batch * NEW_TOKENS / (time.perf_counter() - began)


class _Forget(StoppingCriteria):
    """Stops nothing; puts the files of ``folder`` out of the page cache after every step."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, ids: Tensor, scores: Tensor, **options: Any) -> Tensor:  # noqa: ARG002
        for path in self._folder.glob("*.dat"):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)
        return torch.zeros(ids.shape[0], dtype=torch.bool)
