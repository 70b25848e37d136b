"""The roofline picture: every format, every kind of machine, and nothing that covers something else."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moelight.core.errors import ConfigError
from moelight.core.policy import Policy, Shares
from moelight.hrm.roofline import Roofline, roofline_of
from moelight.observe.plots import SUFFIXES, figure_of, write_roofline
from moelight.profiles.hardware import load_hardware_profile
from moelight.profiles.model_files import load_model_profile
from moelight.profiles.workload import Workload
from tests.published import l4

MIXTRAL = load_model_profile("mixtral")
WORK = Workload(prompt_len=77, max_prompt_len=418, gen_len=32)
PUBLISHED = Policy(
    model="mixtral",
    batch_size=4536,
    micro_batch_size=324,
    ffn_device="gpu",
    weights=Shares(device=0.0559, host=0.9441),
)


def picture(machine: str = "", **changes: object) -> Roofline:
    hardware = load_hardware_profile(machine) if machine else l4()
    return roofline_of(hardware, MIXTRAL, replace(PUBLISHED, **changes), WORK)  # type: ignore[arg-type]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_format_is_written(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"roofs{suffix}"
    write_roofline(path, picture())
    content = path.read_bytes()
    assert content.startswith({".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix])
    if suffix == ".png":
        assert struct.unpack(">I", content[16:20]) == (1200,)


def test_another_suffix_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"roofs\.txt: .*\.png, \.svg, \.pdf"):
        write_roofline(tmp_path / "roofs.txt", picture())
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"moelight\[plots\]"):
        write_roofline(tmp_path / "roofs.png", picture())


@pytest.mark.parametrize(
    ("machine", "changes"),
    [
        ("", {}),
        ("t4", {"attention_device": "gpu"}),
        ("l4", {"weights": Shares(device=1.0), "kv": Shares(device=1.0), "attention_device": "gpu"}),
        ("l4", {"batch_size": 36, "micro_batch_size": 36}),
        ("h200", {"batch_size": 2_000_000, "micro_batch_size": 1_000_000, "micro_batch_tokens": 1_000_000}),
        ("2xa100", {"ffn_device": "split", "cpu_experts": 0.2}),
        ("laptop-nvme", {"weights": Shares(device=0.2, host=0.4, disk=0.4), "batch_size": 64, "micro_batch_size": 16}),
        ("cpu-amx", {"ffn_device": "cpu", "weights": Shares(host=0.6, disk=0.4)}),
    ],
)
def test_names_and_legend_have_their_own_places(machine: str, changes: dict[str, object]) -> None:
    roofline = picture(machine, **changes)
    figure = figure_of(roofline)
    renderer = figure.canvas.get_renderer()
    axes, (legend,) = figure.axes[0], figure.legends
    page, frame = figure.bbox, axes.get_window_extent(renderer)
    box = legend.get_window_extent(renderer)
    assert box.x0 > frame.x1
    assert page.x0 <= box.x0 <= box.x1 <= page.x1
    assert page.y0 <= box.y0 <= box.y1 <= page.y1
    names = [text for text in axes.texts if text.get_fontweight() == "bold"]
    assert {"attention", "experts"} <= {text.get_text() for text in names}
    boxes = [text.get_window_extent(renderer) for text in names]
    for index, one in enumerate(boxes):
        assert one.count_overlaps(boxes[index + 1 :]) == 0
        assert frame.x0 <= one.x0 <= one.x1 <= frame.x1
    for label in (axes.get_xlabel(), axes.get_ylabel()):
        assert "flop /" in label
    low, high = axes.get_xlim()
    assert all(low < value < high for point in roofline.points for value in (point.intensity, point.home_intensity))


def test_the_legend_says_what_the_roofline_says() -> None:
    (legend,) = figure_of(picture()).legends
    rows = "\n".join(text.get_text() for text in legend.get_texts())
    for figure in ("230 GB/s", "62.4 Tflop/s", "13.4 GB/s", "960 Gflop/s", "P1: 71.6", "N = 4,536", "μ = 324"):
        assert figure in rows
    assert "bound by the link from host" in rows
