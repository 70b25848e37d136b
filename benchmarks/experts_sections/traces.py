"""Real routing: the experts a checkpoint chose for every token, and passes composed of it as the engine does.

    python benchmarks/experts_sections/traces.py moelight/demo --task add --batch 4 --out trace.jsonl

A prompt's routing does not depend on who else is in the pass. So every prompt is answered once (greedily, with
transformers on the CPU), its tokens are fed once more in one go with hooks on the routers, and passes of any batch
size are put together from the tokens' rows afterwards. This file knows nothing of moelight.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from train_demo import EOS, TASKS, draw_problem

# Where a guess of layer l + 1 may be taken from, while the pass is in layer l: the residual stream after l's experts,
# the same before them (so before l's misses are read), and the very vector that l's router saw. The first two go
# through l + 1's norm.
AHEAD = ("after", "before", "router")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Of every token of every prompt and its answer but the last, which is never fed.

    Attributes:
        ids: chosen experts [tokens, layers, k], most probable first.
        probs: all routers' probabilities [tokens, layers, experts].
        ahead: a guess of layer l + 1's, made in layer l: kind of `AHEAD` -> [tokens, layers - 1, experts].
        tokens: vocabulary ids [tokens].
        spans: (first token, first answer token, end) of each prompt, as indices of tokens [prompts, 3].
    """

    ids: np.ndarray
    probs: np.ndarray
    ahead: dict[str, np.ndarray]
    tokens: np.ndarray
    spans: np.ndarray

    def passes(self, batch: int) -> list[np.ndarray]:
        """The tokens (indices) of each pass with ``batch`` places: a place brings a whole prompt or one token, and is
        given to the next prompt in the pass after its last token. Ends when the first place finds no prompt left."""
        waiting = iter(self.spans.tolist())
        places: list[Iterator[np.ndarray]] = [iter(()) for _ in range(batch)]
        result: list[np.ndarray] = []
        while True:
            rows = []
            for index, position in enumerate(places):
                row = next(position, None)
                if row is None:
                    span = next(waiting, None)
                    if span is None:
                        return result
                    places[index] = _fed(*span)
                    row = next(places[index])
                rows.append(row)
            result.append(np.concatenate(rows))


def _fed(first: int, answer: int, end: int) -> Iterator[np.ndarray]:
    yield np.arange(first, answer)
    for token in range(answer, end):
        yield np.array([token])


def workload(task: str, count: int, seed: int = 6) -> list[str]:
    """``count`` prompts nobody trained on: of one task, or of ``mixed`` all of them in turn."""
    rng = random.Random(seed)
    tasks = list(TASKS) if task == "mixed" else [task]
    return [draw_problem(rng, tasks[index % len(tasks)], held_out=True).prompt for index in range(count)]


@torch.inference_mode()
def collect(folder: Path, prompts: list[str], longest: int = 24) -> Routing:
    """Answers every prompt with at most ``longest`` tokens and notes all routing."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    fed = _answered(model, [tokenizer(prompt)["input_ids"] for prompt in prompts], longest)
    notes = _Notes(model)
    parts: dict[str, list[np.ndarray]] = defaultdict(list)
    spans, at = [], 0
    for answer, ids in fed:
        notes.clear()
        model(torch.tensor([ids]))
        for name, value in notes.rows().items():
            parts[name].append(value)
        parts["tokens"].append(np.array(ids))
        spans.append((at, at + answer, at + len(ids)))
        at += len(ids)
    full = {name: np.concatenate(values) for name, values in parts.items()}
    return Routing(
        ids=full["ids"],
        probs=full["probs"],
        ahead={kind: full[kind] for kind in AHEAD},
        tokens=full["tokens"],
        spans=np.array(spans),
    )


def _answered(model: Any, prompts: list[list[int]], longest: int) -> list[tuple[int, list[int]]]:
    """Of each prompt its length, and all tokens that are fed for it. Prompts of one length run as one batch, so that
    nothing is padded."""
    lengths = defaultdict(list)
    for index, prompt in enumerate(prompts):
        lengths[len(prompt)].append(index)
    result: list[tuple[int, list[int]]] = [(0, [])] * len(prompts)
    for length, indices in lengths.items():
        inputs = torch.tensor([prompts[index] for index in indices])
        out = model.generate(inputs, max_new_tokens=longest, do_sample=False, pad_token_id=0)
        for index, row in zip(indices, out.tolist(), strict=True):
            end = row.index(EOS, length) if EOS in row[length:] else len(row) - 1
            result[index] = (length, row[:end])
    return result


class _Notes:
    """Hooks on every layer: what the router saw, and the residual stream on both sides of the experts."""

    def __init__(self, model: Any) -> None:
        self.layers = model.model.layers
        self.top_k = model.config.num_experts_per_tok
        self.seen: dict[str, list[torch.Tensor]] = defaultdict(list)
        for layer in self.layers:
            layer.post_attention_layernorm.register_forward_hook(self._normed)
            layer.register_forward_hook(self._left)

    def _normed(self, _module: Any, inputs: Any, out: torch.Tensor) -> None:
        self.seen["before"].append(inputs[0][0])
        self.seen["router"].append(out[0])

    def _left(self, _module: Any, _given: Any, out: Any) -> None:
        self.seen["after"].append(out[0])

    def clear(self) -> None:
        self.seen.clear()

    def rows(self) -> dict[str, np.ndarray]:
        """Of the last forward pass. Guessing calls norms that are hooked too, so the lists are copied first."""
        seen = {kind: list(values) for kind, values in self.seen.items()}
        inputs = zip(self.layers, seen["router"], strict=True)
        probs = torch.stack([_routed(layer, row) for layer, row in inputs], dim=1)
        result = {"probs": probs.numpy(), "ids": probs.topk(self.top_k, dim=-1).indices.numpy().astype(np.uint8)}
        for kind in AHEAD:
            guesses = []
            for layer, row in zip(self.layers[1:], seen[kind][:-1], strict=True):
                normed = row if kind == "router" else layer.post_attention_layernorm(row[None])[0]
                guesses.append(_routed(layer, normed))
            result[kind] = torch.stack(guesses, dim=1).numpy()
        return result


def _routed(layer: Any, row: torch.Tensor) -> torch.Tensor:
    """A router's probabilities [tokens, experts]."""
    return torch.softmax(torch.nn.functional.linear(row, layer.mlp.gate.weight).float(), dim=-1)


def rows_of(routing: Routing, batch: int) -> Iterator[dict[str, Any]]:
    """The rows of a trace file, ``{"l": layer, "e": ids, "s": router weights}``, tokens one behind the other."""
    chosen = np.take_along_axis(routing.probs, routing.ids.astype(np.int64), axis=2)
    weights = chosen / chosen.sum(axis=2, keepdims=True)
    for tokens in routing.passes(batch):
        for layer in range(routing.ids.shape[1]):
            scores = weights[tokens, layer].ravel().round(4).tolist()
            yield {"l": layer, "e": routing.ids[tokens, layer].ravel().tolist(), "s": scores}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--task", choices=["mixed", *TASKS], default="mixed")
    parser.add_argument("--prompts", type=int, default=480)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    routing = collect(args.model, workload(args.task, args.prompts))
    with args.out.open("w") as file:
        for row in rows_of(routing, args.batch):
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
