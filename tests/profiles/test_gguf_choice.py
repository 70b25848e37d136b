"""Which GGUF file a tag means, among names as publishers give them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moelight.core.errors import CheckpointError
from moelight.profiles.gguf_choice import choose_gguf, gguf_choices, gguf_in, unread_encoder

NAMES = [
    "config.json",
    "imatrix_unsloth.dat",
    "imatrix.gguf",
    "mmproj-F16.gguf",
    "mtp-Qwen3-30B-Q8_0.gguf",
    "Qwen3-30B.imatrix.gguf",
    "Qwen3-30B-BF16-00001-of-00002.gguf",
    "Qwen3-30B-BF16-00002-of-00002.gguf",
    "Qwen3-30B-IQ4_XS-4.25bpw.gguf",
    "Qwen3-30B-Q4_K_M.gguf",
    "Qwen3-30B-Q4_K_XL.gguf",
    "UD-Q4_K_XL/Qwen3-30B-UD-Q4_K_XL-00001-of-00002.gguf",
    "UD-Q4_K_XL/Qwen3-30B-UD-Q4_K_XL-00002-of-00002.gguf",
    "Qwen3-30B.i1-IQ2_M.gguf",
]


@pytest.mark.parametrize(
    ("tag", "file"),
    [
        ("Q4_K_M", "Qwen3-30B-Q4_K_M.gguf"),
        ("q4_k_m", "Qwen3-30B-Q4_K_M.gguf"),
        ("bf16", "Qwen3-30B-BF16-00001-of-00002.gguf"),
        ("Q4_K_XL", "Qwen3-30B-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", "UD-Q4_K_XL/Qwen3-30B-UD-Q4_K_XL-00001-of-00002.gguf"),
        ("iq2_m", "Qwen3-30B.i1-IQ2_M.gguf"),
        ("IQ4_XS", "Qwen3-30B-IQ4_XS-4.25bpw.gguf"),
        ("Qwen3-30B-Q4_K_M.gguf", "Qwen3-30B-Q4_K_M.gguf"),
        ("Qwen3-30B-UD-Q4_K_XL-00002-of-00002.gguf", "UD-Q4_K_XL/Qwen3-30B-UD-Q4_K_XL-00001-of-00002.gguf"),
    ],
)
def test_a_tag_or_a_name_is_one_model(tag: str, file: str) -> None:
    assert choose_gguf(NAMES, tag, where="owner/name").files[0] == file


@pytest.mark.parametrize("tag", ["Q3_K_S", "K_M", "F16", "mmproj-F16.gguf"])
def test_what_is_no_model_is_refused_with_the_tags_on_one_line(tag: str) -> None:
    with pytest.raises(CheckpointError, match="no GGUF model there is called") as caught:
        choose_gguf(NAMES, tag, where="owner/name")
    assert "there are BF16, IQ4_XS, Q4_K_M, Q4_K_XL, IQ2_M, UD-Q4_K_XL" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_tag_the_only_model_is_meant_and_several_are_listed() -> None:
    assert choose_gguf(NAMES[1:8], "", where="owner/name").files == tuple(NAMES[6:8])
    with pytest.raises(CheckpointError, match=r"holds 6 GGUF models; .* such as owner/name:BF16; there are BF16, "):
        choose_gguf(NAMES, "", where="owner/name")
    two = ["a/model-Q8_0.gguf", "b/model-Q8_0.gguf"]  # the same tag
    with pytest.raises(CheckpointError, match=r"there are a/model-Q8_0.gguf, b/model-Q8_0.gguf"):
        choose_gguf(two, "q8_0", where="owner/name")
    assert choose_gguf(two, "b/model-Q8_0.gguf", where="owner/name").files == ("b/model-Q8_0.gguf",)
    assert gguf_choices(["mmproj-F16.gguf", "imatrix.gguf"]) == []


def test_a_directory_and_what_lies_beside(tmp_path: Path) -> None:
    assert gguf_in(tmp_path, "") is None
    model = tmp_path / "model-Q8_0.gguf"
    for path in (model, tmp_path / "mmproj-F16.gguf"):
        path.touch()
    assert gguf_in(tmp_path, "") == gguf_in(tmp_path, "q8_0") == model
    assert "mmproj-F16.gguf" in unread_encoder(model)
    assert unread_encoder(tmp_path) == ""
