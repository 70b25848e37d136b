"""A model whose experts are under a pager gives the tokens of the model as it was, from less memory, and comes back."""

from __future__ import annotations

import functools
import gc
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import moelight
from moelight.core.dtypes import FLOAT32
from moelight.core.errors import BudgetError, CheckpointError, ConfigError, MoelightError, UserError
from moelight.core.schedule import Page
from moelight.core.units import MiB, align_up
from moelight.engine.experts import facts_of
from moelight.experts.policy import (
    EVICTIONS,
    STRATEGIES,
    CacheRules,
    Capacity,
    ExpertPolicy,
    PerLayerRules,
    PrefetchRules,
    ScheduleRules,
)
from moelight.experts.profile import ActivationProfile, save_profile
from moelight.integrations import paged_modules
from moelight.integrations.layers import PAGE_ALIGNMENT, MoeLayer, moe_layers
from moelight.integrations.transformers import Attachment
from moelight.paging import offload
from moelight.paging.offload import CopyStream, DiskStore
from moelight.paging.turns import ComputeSeconds, SlotPager
from moelight.profiles.families import profile_from_config
from moelight.profiles.hf_config import HFConfig
from moelight.runtime.twin import EmulatedEvent, EmulatedStream
from tests.cases import thorough
from tests.engines import in_turn
from tests.integrations.moe_models import FAMILIES, build, build_listed, logits, ragged_prompts, tokens
from tests.process import descriptors

POLICIES = sorted((Path(__file__).parents[2] / "examples" / "policies").glob("*.moe"))
DTYPES = (torch.bfloat16, torch.float32)


def policy(
    capacity: int | Capacity = 5,
    *,
    eviction: tuple[str, ...] = ("slru",),
    strategy: str = "next_router",
    per_layer: PerLayerRules | None = None,
) -> ExpertPolicy:
    room = capacity if isinstance(capacity, Capacity) else Capacity(value=capacity)
    return ExpertPolicy(
        name="small",
        cache=CacheRules(capacity=room, eviction=eviction),
        prefetch=PrefetchRules(strategy=strategy, budget=3),
        per_layer=per_layer,
    )


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "gpt_oss"])
def test_a_profile_that_an_engine_saved_serves_the_attached_model(family: str, tmp_path: Path) -> None:
    """Both tell models apart by the same facts."""
    model, path = build(family), tmp_path / "profile.json"
    profile = profile_from_config(HFConfig(model.config.to_dict(), where="config.json"), name=family)
    layers, experts = profile.num_moe_layers, profile.experts.num_experts
    counted = ActivationProfile(model=facts_of(profile, FLOAT32).facts, num_layers=layers, num_experts=experts)
    for layer in range(layers):
        counted.record(layer, np.array([experts - 1, 2]), np.array([9, 4]))
    save_profile(counted, path)
    asked = policy(2 * layers)
    asked = replace(asked, cache=replace(asked.cache, profile=str(path)))
    with moelight.attach(model, asked) as attached:
        near = attached.pager.residency.table >= 0
        assert np.argwhere(near).tolist() == [[layer, e] for layer in range(layers) for e in (2, experts - 1)]
    other = build(family, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match=r"profile\.json.*top_k"):
        moelight.attach(other, asked)


@functools.cache
def untouched(family: str, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Tensor, Tensor, Tensor]:
    """A model, which tests leave as they find it, and its tokens: greedy, sampled; and logits."""
    model = build_listed(dtype) if family == "listed" else build(family, dtype)
    return model, tokens(model), tokens(model, seed=7), logits(model)


@pytest.fixture
def qwen() -> PreTrainedModel:
    return untouched("qwen3_moe")[0]


BY_DTYPE = in_turn([(item,) for item in (*FAMILIES, "listed")], DTYPES)


@pytest.mark.parametrize(("family", "dtype"), thorough(BY_DTYPE, but=BY_DTYPE[::2]))
def test_a_small_budget_gives_the_same_tokens_and_logits(family: str, dtype: torch.dtype) -> None:
    model, greedy, sampled, last = untouched(family, dtype)
    with moelight.attach(model, policy(4)) as attachment:
        assert torch.equal(tokens(model), greedy)
        assert torch.equal(tokens(model, seed=7), sampled)
        assert torch.equal(logits(model), last)
        assert attachment.get_stats()["placement"]["streamed"] > 0  # prompts want more than there is room for
    assert torch.equal(logits(model), last)


@pytest.mark.parametrize("way", ["eager", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_the_model_s_own_way_of_computing_experts_is_kept(family: str, way: str) -> None:
    model = build(family)
    model.set_experts_implementation(way)
    greedy, last = tokens(model), logits(model)
    with moelight.attach(model, policy(7)):
        assert torch.equal(tokens(model), greedy)
        assert torch.equal(logits(model), last)


@pytest.mark.parametrize(
    ("eviction", "capacity"), in_turn([(item,) for item in [*((name,) for name in EVICTIONS), ("lfu", "lru")]], [3, 20])
)
def test_no_eviction_changes_a_token(qwen: PreTrainedModel, eviction: tuple[str, ...], capacity: int) -> None:
    with moelight.attach(qwen, policy(capacity, eviction=eviction), home="memory"):
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])


@pytest.mark.parametrize("strategy", thorough(STRATEGIES, but=["history", "next_router"]))
def test_no_prediction_changes_a_token_and_none_is_read_twice(qwen: PreTrainedModel, strategy: str) -> None:
    alone = tokens(qwen, count=1, new=16)
    with moelight.attach(qwen, policy(14, eviction=("lru",), strategy=strategy)) as attachment:
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])
        assert torch.equal(tokens(qwen, count=1, new=16), alone)
        result = attachment.get_stats()
        assert result["placement"]["transfers"] == (
            result["policy"]["cache"]["misses"] + result["policy"]["prefetch"]["issued"]
        )
        if strategy in ("history", "affinity", "next_router"):  # others have nothing to say of so little
            assert result["policy"]["prefetch"]["useful"] > 0


@pytest.mark.parametrize("file", thorough(POLICIES, but=POLICIES[::3]), ids=lambda path: path.stem)
def test_each_policy_of_the_examples_gives_the_same_tokens(file: Path) -> None:
    model, greedy, _, last = untouched("qwen3_moe")
    with moelight.attach(model, file):
        assert torch.equal(tokens(model), greedy)
        assert torch.equal(logits(model), last)


def test_beams_and_budgets_of_layers(qwen: PreTrainedModel) -> None:
    beams = tokens(qwen, new=4, num_beams=3)
    rules = PerLayerRules(
        allocation="entropy", entropy_window=16, min_capacity=2, max_capacity=12, rebalance_interval=16
    )
    with moelight.attach(qwen, policy(6, per_layer=rules)):
        assert torch.equal(tokens(qwen, new=4, num_beams=3), beams)


ADAPTING = """
policy restless {
  cache { capacity = 6  eviction = lru  warm_pin = 20  pin = [1, 3]  ttl = 40 }
  prefetch { strategy = history  budget = 2 }
  monitor { window = 20 }
  adapt {
    when hit_rate < 0.9 for 10 accesses { eviction = lfu }
    when hit_rate < 0.9 for 30 accesses { capacity = 14 }
    when hit_rate < 0.95 for 60 accesses { trigger memory_pressure }
    when hit_rate < 0.95 for 90 accesses { capacity = 6 }
  }
}
"""


def test_a_policy_that_changes_while_it_runs_changes_no_token(qwen: PreTrainedModel) -> None:
    alone = tokens(qwen, count=2, new=16)
    with moelight.attach(qwen, ADAPTING) as attachment:
        assert (
            attachment.resident_bytes == (14 + 4) * attachment.offloaded_bytes // 32
        )  # room for what a rule may ask for
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])
        assert torch.equal(tokens(qwen, count=2, new=16), alone)
        result = attachment.get_stats()["experts"]
    assert result["adaptations"]["changes"] >= 3
    assert result["warm_pin"]["fired"]


@pytest.mark.parametrize("family", ["mixtral", "listed"])
def test_detach_leaves_the_model_as_it_was(family: str) -> None:
    model = untouched(family)[0]
    before = dict(model.named_parameters())
    values = {name: value.clone() for name, value in before.items()}
    keys, modules = list(model.state_dict()), {name: dict(vars(module)) for name, module in model.named_modules()}
    attachment = moelight.attach(model, policy())
    tokens(model, new=2)
    attachment.detach()
    attachment.detach()
    assert list(model.state_dict()) == keys
    for name, parameter in model.named_parameters():
        assert parameter is before[name]
        assert torch.equal(parameter, values[name])
    for name, module in model.named_modules():
        assert vars(module).keys() == modules[name].keys()


def test_what_a_slot_is_said_to_hold_is_in_it() -> None:
    model = untouched("mixtral")[0]
    experts = [layer.mlp.experts for layer in model.model.layers]
    weights = [(expert.gate_up_proj.detach().clone(), expert.down_proj.detach().clone()) for expert in experts]
    with moelight.attach(model, policy(9, eviction=("lru",))) as attachment:
        tokens(model)
        pager, seen = attachment.pager, 0
        with pager.turn(0) as turn:
            for layer, experts_of in enumerate(pager.residency.table.tolist()):
                for expert, slot in enumerate(experts_of):
                    if slot >= 0:
                        pager.wait(Page(layer=layer, expert=expert), slot)
                        gate_up, down = (piece.of(pager.slots[slot]) for piece in moe_pieces(attachment))
                        assert torch.equal(gate_up, weights[layer][0][expert])
                        assert torch.equal(down, weights[layer][1][expert])
                        seen += 1
            assert len(pager.residency.pages()) == seen == 9
            slot = int(pager.residency.table.max())
            with pytest.raises(MoelightError, match="was expected"):
                pager.wait(wrong(pager.table.pages[slot]), slot)
            assert len(turn) == 0


def moe_pieces(attachment: Attachment) -> Any:
    return moe_layers_of(attachment)[0].pieces


def wrong(page: Page | None) -> Page:
    assert page is not None
    return replace(page, expert=page.expert + 1)


def test_the_memory_of_the_experts_is_really_given_back(tmp_path: Path) -> None:
    model = build("mixtral", hidden_size=256, intermediate_size=1024, num_local_experts=8)
    taken = sum(layer.page_bytes * layer.num_experts for layer in moe_layers(model))
    assert taken >= 72 * MiB
    gc.collect()
    before = psutil.Process().memory_info().rss
    attachment = moelight.attach(model, policy(Capacity(value=12.5, unit="percent")), directory=tmp_path)
    tokens(model, new=2)
    gc.collect()
    fallen = before - psutil.Process().memory_info().rss
    assert attachment.resident_bytes < 0.3 * taken
    assert fallen > 0.5 * taken
    assert not list(tmp_path.iterdir())  # the file has no name
    attachment.detach()
    assert sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) > taken


def test_a_model_that_is_dropped_takes_its_pages_with_it(tmp_path: Path) -> None:
    model = build("mixtral")
    moelight.attach(model, policy(), directory=tmp_path)
    tokens(model, new=1)
    assert open_files(tmp_path)
    del model
    gc.collect()
    assert not open_files(tmp_path)


def open_files(directory: Path) -> list[str]:
    return [str(file) for file in descriptors().values() if file.is_relative_to(directory)]


def test_two_threads_may_generate_at_once() -> None:
    model, greedy, _, _ = untouched("mixtral")
    result: list[Tensor] = []
    with moelight.attach(model, policy(7)):
        threads = [threading.Thread(target=lambda: result.append(tokens(model))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [torch.equal(item, greedy) for item in result] == [True, True]


@pytest.mark.parametrize("family", ["qwen3_moe", "listed"])
def test_streams_of_a_device_do_the_same(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, greedy, _, _ = untouched(family)
    compute = EmulatedStream()
    monkeypatch.setattr(offload, "copies_to", lambda _: CopyStream(EmulatedStream(), lambda: compute, EmulatedEvent))
    with moelight.attach(model, policy(12, eviction=("lru",)), home="memory") as attachment:
        assert torch.equal(tokens(model), greedy)
        tokens(model, count=1)
        assert attachment.get_stats()["policy"]["prefetch"]["useful"] > 0


BY_MODE = in_turn(BY_DTYPE, ["cpu_fallback", "hybrid"])


@pytest.mark.parametrize(
    ("family", "dtype", "mode"),
    thorough([(*case, mode) for case in BY_DTYPE for mode in ("cpu_fallback", "hybrid")], but=BY_MODE[::2]),
)
def test_experts_computed_where_they_are_stored_give_the_same_tokens(
    family: str, dtype: torch.dtype, mode: str
) -> None:
    """A fallback fetches nothing but what is predicted; `hybrid` tries either way before it knows their seconds."""
    model, greedy, sampled, last = untouched(family, dtype)
    asked = replace(policy(4, strategy="none"), schedule=ScheduleRules(mode=mode, offload_threshold_ms=0.0))
    with moelight.attach(model, asked, home="memory") as attachment:
        assert torch.equal(tokens(model), greedy)
        assert torch.equal(tokens(model, seed=7), sampled)
        assert torch.equal(logits(model), last)
        moved = attachment.get_stats()["placement"]
    assert moved["in_place"] > 0
    assert mode == "hybrid" or moved["transfers"] == 0


@pytest.mark.parametrize("way", ["eager", "grouped_mm", "batched_mm"])
def test_other_experts_of_a_layer_are_fetched_meanwhile(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the missing experts, as on a device whose experts compute together: outputs are one layer's."""
    model = build("qwen3_moe")
    model.set_experts_implementation(way)
    last = logits(model)
    monkeypatch.setattr(SlotPager, "left_in_place", lambda self, layer, ids: frozenset(np.unique(ids)[::2].tolist()))
    monkeypatch.setattr(paged_modules, "on_host", lambda _: False)
    with moelight.attach(model, policy(4), home="memory") as attachment:
        torch.testing.assert_close(logits(model), last, rtol=1e-4, atol=1e-5)
        moved = attachment.get_stats()["placement"]
    assert moved["in_place"] > 0
    assert moved["transfers"] > 0


def test_seconds_of_an_expert_are_those_of_the_nearest_number_of_tokens() -> None:
    seconds = ComputeSeconds()
    assert seconds.expected(np.array([1, 64])).tolist() == [0.0, 0.0]
    seconds.note(1, 0.25)
    seconds.note(64, 1.0)
    assert seconds.expected(np.array([2, 48, 1000])).tolist() == [0.25, 1.0, 1.0]
    seconds.note(1, 8.25)
    assert seconds.expected(np.array([1])).tolist() == [1.25]


def test_experts_on_a_disk_are_read_whatever_the_mode(qwen: PreTrainedModel) -> None:
    asked = replace(policy(4), schedule=ScheduleRules(mode="cpu_fallback"))
    with moelight.attach(qwen, asked) as attachment:
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])
        assert attachment.get_stats()["placement"]["in_place"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("way", ["eager", "grouped_mm"])
def test_the_cpu_computes_misses_of_a_model_on_a_gpu(way: str) -> None:
    model = build("qwen3_moe").to("cuda")
    model.set_experts_implementation(way)
    ids, mask = (item.to("cuda") for item in ragged_prompts(2))
    with torch.no_grad():
        last = model(ids, attention_mask=mask).logits
        with moelight.auto_attach(model, memory=1 << 18, mode="cpu_fallback") as attachment:
            torch.testing.assert_close(model(ids, attention_mask=mask).logits, last, rtol=1e-3, atol=1e-3)
            assert attachment.get_stats()["placement"]["in_place"] > 0


def test_a_disk_that_fails_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, qwen: PreTrainedModel) -> None:
    attachment = moelight.attach(qwen, policy())
    with monkeypatch.context() as failing:
        failing.setattr(DiskStore, "_at", lambda *_: 1 << 50)
        for _ in range(2):
            with pytest.raises(CheckpointError, match="cannot be read"):
                tokens(qwen, new=1)
    attachment.detach()
    assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])


def test_gradients_are_refused_where_they_would_be_wrong(qwen: PreTrainedModel) -> None:
    ids, mask = ragged_prompts(2)
    with moelight.attach(qwen, policy()):
        loss = qwen(ids, attention_mask=mask).logits.sum()
        with pytest.raises(UserError, match="detach"):
            loss.backward()
    qwen.zero_grad()


@pytest.mark.parametrize("family", ["mixtral", "listed"])
def test_a_model_that_is_changed_meanwhile_is_an_error_not_other_tokens(family: str) -> None:
    model = build_listed() if family == "listed" else build(family)
    with moelight.attach(model, policy()):
        model.half()
        with pytest.raises(UserError, match="changed while it was attached"):
            tokens(model, new=1)


def test_stats_are_plain_and_add_up(qwen: PreTrainedModel) -> None:
    with moelight.attach(qwen, policy(16)) as attachment:
        tokens(qwen)
        result = json.loads(json.dumps(attachment.get_stats()))
    cache, placement = result["policy"]["cache"], result["placement"]
    assert result["policy"]["name"] == "small"
    assert cache["hit_rate"] == cache["hits"] / (cache["hits"] + cache["misses"])
    assert placement["bytes"] == placement["transfers"] * result["resident_bytes"] // (16 + 4)
    assert placement["transfer_s"] > 0
    assert result["experts"]["cache"]["residents"] <= result["experts"]["cache"]["capacity"] == 16


def test_auto_attach_chooses_and_says_why(qwen: PreTrainedModel) -> None:
    with moelight.auto_attach(qwen) as attachment:
        assert attachment.policy.cache.capacity.value == 2 * 3 * 2  # twice a token's experts, two sparse layers
        assert "12 of 32 experts" in attachment.reason
        assert "\n" not in attachment.reason
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])
    with moelight.auto_attach(qwen, batch=64) as attachment:
        assert attachment.policy.cache.capacity.value == 32


def test_auto_attach_takes_advice(qwen: PreTrainedModel) -> None:
    page = next(layer.page_bytes for layer in moe_layers(qwen))
    room = (5 + 4) * align_up(page, PAGE_ALIGNMENT)
    with moelight.auto_attach(qwen, memory=room, prefetch="history", warm_pin=20) as attachment:
        assert attachment.policy.cache.capacity.value == 5
        assert attachment.resident_bytes == room
        assert attachment.policy.prefetch.strategy == "history"
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])
        assert attachment.get_stats()["experts"]["warm_pin"]["fired"]
    for options, says in (({"prefetch": "histroy"}, "did you mean"), ({"warm_pin": 0}, "at least 1")):
        with pytest.raises(ConfigError, match=says):
            moelight.auto_attach(qwen, **options)
    with pytest.raises(BudgetError):
        moelight.auto_attach(qwen, memory=page)


@pytest.mark.parametrize(
    ("family", "where"),
    thorough(
        product(["qwen3_moe", "listed"], ["disk", "memory", "unmoved"]),
        but=[("qwen3_moe", "disk"), ("listed", "memory")],
    ),
)
def test_a_model_that_accelerate_dispatched_gives_the_same_tokens(family: str, where: str, tmp_path: Path) -> None:
    model = build_listed() if family == "listed" else build(family)
    _, greedy, _, last = untouched(family)
    offloaded: dict[str, Tensor] = {}
    if where == "memory":  # all of the model, its routers too
        offloaded = {name: value.detach().clone() for name, value in model.state_dict().items()}
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"), state_dict=offloaded)
    else:
        device = "disk" if where == "disk" else "cpu"
        device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
        for layer, block in enumerate(model.model.layers):
            for name, _ in block.named_children():
                device_map[f"model.layers.{layer}.{name}"] = device if name == "mlp" else "cpu"
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    before = {name: value.numel() for name, value in offloaded.items()}
    with moelight.attach(model, policy(5)) as attachment:
        assert torch.equal(tokens(model), greedy)
        assert torch.equal(logits(model), last)
        assert attachment.get_stats()["placement"]["streamed"] > 0
        assert all(not offloaded[name].numel() for name in before if ".experts." in name)  # pages alone have them
    assert {name: value.numel() for name, value in offloaded.items()} == before
    assert torch.equal(tokens(model), greedy)
    assert torch.equal(logits(model), last)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_experts_of_a_checkpoint_go_from_its_files_to_pages(family: str, tmp_path: Path) -> None:
    model, greedy, _, last = untouched(family)
    checkpoint, scratch = tmp_path / "model", tmp_path / "scratch"
    scratch.mkdir()
    model.save_pretrained(checkpoint)
    with moelight.attach(checkpoint, policy(5), device="cpu", directory=scratch) as attachment:
        built = attachment.model
        experts = [value for layer in moe_layers_of(attachment) for value in layer.experts.parameters()]
        assert experts
        assert all(value.is_meta for value in experts)
        assert not list(scratch.iterdir())
        assert torch.equal(tokens(built), greedy)
        assert torch.equal(logits(built), last)
    assert not any(value.is_meta for value in built.parameters())
    assert torch.equal(logits(built), last)
    with moelight.auto_attach(str(checkpoint), dtype="bfloat16") as attachment:
        assert next(attachment.model.parameters()).dtype == torch.bfloat16
        assert tokens(attachment.model, new=1).shape == (12, 12)


def moe_layers_of(attachment: Attachment) -> list[MoeLayer]:
    return attachment._layers


def _meta(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.experts.to("meta")


def _tied(model: PreTrainedModel) -> None:
    model.model.layers[1].mlp.experts.gate_up_proj = model.model.layers[0].mlp.experts.gate_up_proj


def _whole_numbers(model: PreTrainedModel) -> None:
    down = model.model.layers[0].mlp.experts.down_proj
    model.model.layers[0].mlp.experts.down_proj = nn.Parameter(down.to(torch.int8), requires_grad=False)


def _preloaded(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp._hf_hook = SimpleNamespace(offload=True, place_submodules=True)


def _dense(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.mlp = nn.Identity()


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_meta, "no values"),
        (_tied, "shares its memory"),
        (_whole_numbers, "int8"),
        (_preloaded, "preload_module_classes"),
        (_dense, "no experts"),
    ],
)
def test_models_that_cannot_be_moved_are_refused_untouched(damage: Any, says: str) -> None:
    model = build("mixtral")
    damage(model)
    before = {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)}
    with pytest.raises(ConfigError, match=says):
        moelight.attach(model, policy())
    assert {name: id(value) for name, value in model.named_parameters(remove_duplicate=False)} == before


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"home": "dsk"}, "did you mean 'disk'"),
        ({"directory": "/nowhere/at/all"}, "cannot hold"),
        ({"device": "cpu"}, "for checkpoints"),
        ({"policy": 7}, "path"),
        ({"policy": Path("/nowhere.moe")}, "nowhere.moe"),
        ({"policy": policy(Capacity(value=100, unit="bytes"))}, "no expert"),
    ],
)
def test_wrong_arguments_are_refused(qwen: PreTrainedModel, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        moelight.attach(qwen, options.pop("policy", policy()), **options)
    assert torch.equal(logits(qwen), untouched("qwen3_moe")[3])


def test_one_pager_at_a_time(qwen: PreTrainedModel) -> None:
    with moelight.attach(qwen, policy()), pytest.raises(ConfigError, match="attached already"):
        moelight.attach(qwen, policy())
    with moelight.attach(qwen, "policy small { cache { capacity = 4 } }") as attachment:
        assert attachment.policy.cache.capacity == Capacity(value=4)


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    yield
    assert not pager_threads()


def pager_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "moelight-experts" in thread.name]


def test_an_expert_that_fails_midway_leaves_the_pager_fit_to_go_on(qwen: PreTrainedModel) -> None:
    calls = iter(range(1000))

    def fails_once(*_: Any) -> None:
        if next(calls) == 5:
            raise KeyboardInterrupt

    hook = qwen.model.layers[2].mlp.experts.act_fn.register_forward_hook(fails_once)
    with moelight.attach(qwen, policy(6, eviction=("lru",))):
        with pytest.raises(KeyboardInterrupt):
            tokens(qwen)
        assert torch.equal(tokens(qwen), untouched("qwen3_moe")[1])
    hook.remove()
