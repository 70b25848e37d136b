"""Forward passes of paged expert layers: the model's own code, run over slots.

Results equal those of the unmodified model, bit for bit as far as the library's products allow: an expert receives the
same rows in the same order, and a token's experts are summed in the model's order. Shapes: T tokens, k experts of a
token, H hidden, S slots.
"""

from __future__ import annotations

import copy
import inspect
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from moelight.core.errors import ConfigError, UserError
from moelight.integrations.layers import ExpertParameter, MoeLayer, TensorSlice, accelerate_hooks, as_array
from moelight.kernels.device import on_host
from moelight.paging.turns import SlotPager, Slots, Turn

# A call of transformers' experts over all slots costs as much as a call for a single expert, plus a twenty-fifth of
# that for each slot without tokens (3 us of 80; docs/log.md).
_EMPTY_SLOTS_A_CALL = 25
# CUDA's grouped product supports fewer than 1024 groups.
_SLOTS_A_CALL = 1000
_ARGUMENTS = 3
_KNOWN = ("grouped_mm", "batched_mm", "eager", None)


class NotTrainable(torch.autograd.Function):
    """Identity whose backward pass raises an error that explains why there is no gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, inputs: Tensor) -> Tensor:  # noqa: ARG004
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # noqa: ARG004
        raise UserError("experts under moelight.attach have no gradients; call detach() before training")


def _not_trainable(output: Any, inputs: Tensor | None) -> Any:
    """``output``, a tensor or a tuple that begins with one, under `NotTrainable` where a gradient would be computed."""
    if inputs is None or not (torch.is_grad_enabled() and inputs.requires_grad):
        return output
    if isinstance(output, tuple):
        return NotTrainable.apply(output[0], inputs), *output[1:]
    return NotTrainable.apply(output, inputs)


class PagedExpertModule(ABC):
    """One layer's experts under a pager, from `install` until ``undo`` is closed; ``coming`` is the next layer."""

    def __init__(self, layer: MoeLayer, number: int, coming: tuple[int, MoeLayer], pager: SlotPager) -> None:
        self.layer, self.number, self.coming, self.pager = layer, number, coming, pager
        self.undo = ExitStack()

    @abstractmethod
    def install(self) -> None:
        """Replace the forward of the layer's modules."""

    def _check(self) -> None:
        held = self.layer.parameters[0]
        placeholder = held.owner._parameters[held.key]
        if placeholder is None or placeholder.dtype != held.piece.dtype:
            raise UserError(f"{self.layer.name} was changed while it was attached; detach() before .to() and the like")

    def _look_ahead(self, turn: Turn, states: Tensor) -> None:
        """Prefetch for later layers. The next layer's router is evaluated on this layer's hidden ``states`` [T, H] if
        the active predictor uses that."""
        number, coming = self.coming
        predicted = coming.predicted(states) if self.pager.residency.predicts_experts else None
        if predicted is not None:
            self.pager.residency.expect(number, *predicted)
        turn.look_ahead()

    def _without_hooks(self, module: nn.Module) -> None:
        """Keep accelerate from moving the parameters of ``module`` around its forward pass."""
        if accelerate_hooks(module) and "_old_forward" in vars(module):
            self._replace_forward(module, module._old_forward)  # type: ignore[arg-type]

    def _replace_forward(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward
        if before is None:
            self.undo.callback(module.__dict__.pop, "forward")
        else:
            self.undo.callback(module.__dict__.update, forward=before)


class PagedFusedExperts(PagedExpertModule):
    """Experts of one module, called with hidden states [T, H], ids [T, k] and weights [T, k]."""

    def __init__(self, layer: MoeLayer, number: int, coming: tuple[int, MoeLayer], pager: SlotPager) -> None:
        super().__init__(layer, number, coming, pager)
        self._signature = inspect.signature(type(layer.experts).forward)
        if len(self._signature.parameters) != 1 + _ARGUMENTS:
            raise ConfigError(
                f"{layer.name} ({type(layer.experts).__name__}) needs other arguments than hidden states, experts and "
                "their weights; attach does not know them"
            )
        self._over = {piece.name: piece.over(pager.slots) for piece in layer.pieces}

    def install(self) -> None:
        self._replace_forward(self.layer.experts, self._forward)

    def _forward(self, *args: Any, **kwargs: Any) -> Tensor:
        self._check()
        experts = self.layer.experts
        _, states, ids, weights = self._signature.bind(experts, *args, **kwargs).arguments.values()
        way = getattr(experts.config, "_experts_implementation", None)  # generate() may change it between calls
        if way not in _KNOWN:
            raise ConfigError(
                f"experts_implementation {way!r} cannot be paged; set one of {', '.join(map(str, _KNOWN))}"
            )
        with torch.no_grad(), self.pager.turn(self.number) as turn:
            turn.need(as_array(ids, np.int64), as_array(weights, np.float32))
            self._look_ahead(turn, states)
            apart = bool(turn.in_place) and not on_host(states)  # some experts of the loop are not on its device
            compute = self._one_by_one if way in ("eager", None) and not apart else self._together
            output = compute(turn, states, ids, weights)
        return _not_trainable(output, states)

    def _one_by_one(self, turn: Turn, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The class's own loop looks up one expert after the other."""
        tensors = {piece.name: _Lookup(turn, piece, self.pager.slots.device) for piece in self.layer.pieces}
        stand_in = self._stand_in(tensors, self.layer.num_experts)
        return type(self.layer.experts).forward(stand_in, states, ids, weights)

    def _together(self, turn: Turn, states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Grouped or batched products over the experts that are ready, then over those that have arrived meanwhile."""
        tokens, k = ids.shape
        flat, together = ids.reshape(-1), not on_host(states)
        forward = type(self.layer.experts).forward
        outputs = self._in_place(turn, states, flat, k)
        for ready in turn.arriving(together=together):
            for first, last, slots in self._calls(ready, together=together):
                table = torch.full((self.layer.num_experts,), -1, dtype=torch.int64)
                table[list(slots)] = torch.tensor(list(slots.values())) - first
                where = table.to(ids.device)[flat]
                stand_in = self._stand_in({name: over[first:last] for name, over in self._over.items()}, last - first)
                if len(slots) == len(turn):  # one call covers everything, so run the model's own
                    return forward(stand_in, states, where.view(tokens, k), weights)
                pairs = (where >= 0).nonzero().view(-1)
                rows = states[pairs // k]
                part = forward(stand_in, rows, where[pairs].view(-1, 1), rows.new_ones(pairs.numel(), 1))
                if outputs is None:
                    outputs = part.new_empty(tokens * k, part.shape[-1])
                outputs[pairs] = part
        if outputs is None:  # no token
            return torch.zeros_like(states)
        weighted = outputs * weights.reshape(-1, 1)
        return weighted.view(tokens, k, -1).sum(dim=1).to(states.dtype)

    def _in_place(self, turn: Turn, states: Tensor, flat: Tensor, k: int) -> Tensor | None:
        """Outputs [T * k, H], so far of the experts computed where they are stored; None if there are none. Pages and
        products of the other experts go on meanwhile."""
        if not turn.in_place:
            return None
        host_states, host_ids = states.cpu(), flat.cpu()
        outputs: Tensor | None = None
        for expert, page in turn.in_place.items():
            pairs = (host_ids == expert).nonzero().view(-1)
            tensors = {piece.name: piece.of(page).unsqueeze(0) for piece in self.layer.pieces}
            rows = host_states[pairs // k]
            first, ones = pairs.new_zeros(len(rows), 1), rows.new_ones(len(rows), 1)
            began = time.perf_counter()
            part = type(self.layer.experts).forward(self._stand_in(tensors, 1, host=True), rows, first, ones)
            turn.note_computed(len(rows), time.perf_counter() - began)
            if outputs is None:
                outputs = states.new_empty(len(flat), part.shape[-1], dtype=part.dtype)
            outputs[pairs.to(outputs.device)] = part.to(outputs.device)
        return outputs

    def _calls(self, ready: Slots, *, together: bool) -> list[tuple[int, int, Slots]]:
        """``(first slot, last slot + 1, experts)`` of each product."""
        low, high = min(ready.values()), max(ready.values()) + 1
        if high - low <= _SLOTS_A_CALL and (together or high - low <= _EMPTY_SLOTS_A_CALL * len(ready)):
            return [(low, high, ready)]
        size = _SLOTS_A_CALL if together else 1
        windows: dict[int, Slots] = {}
        for expert, slot in ready.items():
            windows.setdefault(slot // size, {})[expert] = slot
        return [(min(part.values()), max(part.values()) + 1, part) for part in windows.values()]

    def _stand_in(self, tensors: dict[str, Any], num_experts: int, *, host: bool = False) -> nn.Module:
        """Copy of the experts' module with other tensors and number of experts; ``host``: all in host memory."""
        stand_in = copy.copy(self.layer.experts)
        others: dict[str, Any] = {
            name: _to_host(value) if host else value
            for name, value in self.layer.experts._parameters.items()
            if name not in tensors
        }
        stand_in.__dict__.update(tensors, _parameters=others, num_experts=num_experts)
        return stand_in


class _Lookup:
    """A tensor over experts of which only the experts looked up are transferred."""

    def __init__(self, turn: Turn, piece: TensorSlice, device: torch.device) -> None:
        self._turn, self._piece = turn, piece
        self.dtype, self.device = piece.dtype, device

    def __getitem__(self, expert: Tensor | int) -> Tensor:
        return self._piece.of(self._turn.page(int(expert)))


def _to_host(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value


class PagedExpertList(PagedExpertModule):
    """Experts in a module list, called one by one; their router's output announces them if it can be decoded."""

    _turn: Turn | None = None

    def install(self) -> None:
        self._replace_forward(self.layer.block, self._block_forward(self.layer.block.forward))
        assert self.layer.router is not None  # a list without one is no MoE layer
        self.undo.callback(self.layer.router.register_forward_hook(self._routed).remove)
        for module in self.layer.experts.modules():
            self._without_hooks(module)
        for expert, module in enumerate(self.layer.experts.children()):
            owned = [held for held in self.layer.parameters if held.expert == expert]
            self._replace_forward(module, self._expert_forward(expert, module.forward, owned))

    def _block_forward(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def served(*args: Any, **kwargs: Any) -> Any:
            self._check()
            inputs = next((argument for argument in (*args, *kwargs.values()) if isinstance(argument, Tensor)), None)
            with torch.no_grad(), self.pager.turn(self.number) as turn:
                self._turn = turn
                try:
                    output = forward(*args, **kwargs)
                finally:
                    self._turn = None
            return _not_trainable(output, inputs)

        return served

    def _routed(self, _: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        turn = self._turn
        chosen = None if turn is None else self.layer.chosen(output)
        if turn is not None and chosen is not None:
            turn.need(*chosen)
            self._look_ahead(turn, inputs[0].reshape(-1, inputs[0].shape[-1]))

    def _expert_forward(
        self, expert: int, forward: Callable[..., Any], owned: list[ExpertParameter]
    ) -> Callable[..., Any]:
        def served(states: Tensor, *args: Any, **kwargs: Any) -> Any:
            turn = self._turn
            if turn is None:
                raise UserError(
                    f"{self.layer.name}: expert {expert} was called outside of its block, which has the pager"
                )
            if not states.numel():
                return states  # some blocks call every expert, even without tokens
            if not turn.has(expert):
                shape = (len(states), 1)
                turn.need(np.full(shape, expert, dtype=np.int64), np.ones(shape, dtype=np.float32))
            page = turn.page(expert)
            away = [held.owner._parameters[held.key] for held in owned]
            for held in owned:
                held.owner._parameters[held.key] = held.piece.of(page)  # type: ignore[assignment]  # a view of the slot
            try:
                if expert not in turn.in_place:
                    return forward(states, *args, **kwargs)
                host_args = [_to_host(value) for value in (states, *args)]
                host_kwargs = {name: _to_host(value) for name, value in kwargs.items()}
                began = time.perf_counter()
                output = forward(*host_args, **host_kwargs)
                turn.note_computed(len(states), time.perf_counter() - began)
                return output.to(states.device)
            finally:
                for held, placeholder in zip(owned, away, strict=True):
                    held.owner._parameters[held.key] = placeholder

        return served
