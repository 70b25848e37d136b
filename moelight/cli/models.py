"""``moelight models``: which models this installation runs, how, and what was tested."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from moelight.cli import ERRORS
from moelight.cli import planning_options as ask
from moelight.cli.options import argument, with_options
from moelight.cli.tables import indented, open_console, plain_table, print_json, section, show, stacked, text
from moelight.core.errors import ConfigError
from moelight.core.units import format_bytes
from moelight.profiles.gguf_tested import ArchitectureTest, read_tests

if TYPE_CHECKING:
    from rich.table import Table as View

    from moelight.models.graph.family_table import Family
    from moelight.models.graph.self_test import Verdict
    from moelight.models.graph.support import Support

_HOW = {
    "native": "moelight's own decoder",
    "graph": "transformers' module graph, suspended at attention and experts",
    "opaque": "transformers' module graph; its own cache serves the attention, one sequence at a time",
    None: "not at all",
}


@with_options()
def models(
    *,
    model: str | None = argument("[MODEL]", "Model family, known model, or directory of a config.json.", None),
    as_json: ask.Json = False,
) -> None:
    """List the families of models that run, how, and what was tested; of one MODEL all of that, and test it.

    The families are those of the installed transformers that have experts. Architectures of GGUF files follow, with the
    greedy tokens from tiny files of llama.cpp's converter that are transformers', and the files of its quantiser whose
    tokens are those of their values. The test compares a tiny model with the
    switches of MODEL's config with transformers' eager forward, as is done before a job. Exit code 1: MODEL does not
    run.
    """
    if model is None:
        _list(as_json=as_json)
    elif not _one(model, as_json=as_json):
        raise typer.Exit(ERRORS)


def _list(*, as_json: bool) -> None:
    from moelight.models.graph.family_table import known_table, self_tests, versions

    theirs, torch, moelight_version = versions()
    table = known_table()
    if table is None:
        print(f"looking at the families of transformers {theirs}: a few minutes, once", file=sys.stderr)
        from moelight.models.graph.support import judge_families

        table = judge_families()
    passed = self_tests()
    if as_json:
        families = [family_as_dict(family, passed) for family in table.families]
        architectures = [asdict(test) for test in read_tests()]
        installed = {"transformers": theirs, "torch": torch, "moelight": moelight_version}
        print_json({**installed, "families": families, "gguf": architectures})
        return
    runs = [family for family in table.families if family.how is not None]
    kinds = ", ".join(f"{sum(family.how == how for family in runs)} {how}" for how in ("native", "graph", "opaque"))
    show(
        open_console(),
        text((f"transformers {theirs}", "bold"), f": {len(runs)} of {len(table.families)} families run ({kinds})"),
        _families(runs, passed),
        _others([family for family in table.families if family.how is None]),
        _architectures(read_tests()),
        text(("moelight models NAME says more of one, or of the config.json in a directory, and tests it", "dim")),
    )


def _families(runs: Sequence[Family], passed: dict[str, float]) -> View:
    view = plain_table("family", "runs", "mixers", ">error", ">greedy", ">self-test")
    for family in runs:
        error = "" if family.error is None else f"{family.error:.1e}"
        same = f"{family.same}/{family.prompts}" if family.prompts else ""
        here = _passed(family, passed)
        shown = "" if here is None else f"{here:.1e}"
        view.add_row(text(family.name), family.how, ", ".join(family.mixers), error, same, shown)
    return view


def _others(families: Sequence[Family]) -> View:
    view = plain_table("does not run", "because")
    for family in families:
        view.add_row(text(family.name), text((family.reason or "", "dim")))
    view.columns[-1].no_wrap = False
    return view


def _architectures(tests: Sequence[ArchitectureTest]) -> View:
    view = plain_table("GGUF architecture", "family", ">greedy", ">quantised")
    for test in tests:
        same = sum(result == f"{test.tokens} of {test.tokens}" for result in test.kinds.values())
        files = f"{same}/{len(test.kinds)}" if test.kinds else ""
        view.add_row(text(test.name), text(test.model_type), f"{test.equal}/{test.tokens}", files)
    return view


def _passed(family: Family, passed: dict[str, float]) -> float | None:
    """The largest error of the self-tests of ``family`` that passed here; None if there was none."""
    return max((passed[model_type] for model_type in family.types if model_type in passed), default=None)


def family_as_dict(family: Family, passed: dict[str, float]) -> dict[str, Any]:
    """One family as plain values."""
    return {
        "name": family.name,
        "model_types": list(family.types),
        "how": family.how,
        "reason": family.reason,
        "mixers": list(family.mixers),
        "error": family.error,
        "greedy_prompts": family.prompts,
        "greedy_same": family.same,
        "self_test": _passed(family, passed),
    }


def _one(model: str, *, as_json: bool) -> bool:
    """Show one model; returns whether it runs."""
    from moelight.models.graph.self_test import tested
    from moelight.models.graph.support import find_config, support

    config = find_config(model)
    supported, verdict, failed = support(config), None, None
    if supported.how in ("graph", "opaque"):
        path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
        config_text = path.read_text(encoding="utf-8") if path.name == "config.json" else config.to_json_string()
        try:
            verdict = tested(config, config_text)
        except ConfigError as error:
            failed = str(error)
    differs = failed if verdict is None else verdict.differs
    if as_json:
        print_json(model_as_dict(model, supported, verdict, differs))
    else:
        _print(model, supported, verdict, differs)
    return supported.how is not None and differs is None


def model_as_dict(model: str, supported: Support, verdict: Verdict | None, differs: str | None) -> dict[str, Any]:
    """One model as plain values; sizes in bytes; ``self_test`` is null where none is made."""
    result: dict[str, Any] = {
        "model": model,
        "model_type": supported.model_type,
        "how": supported.how,
        "reason": supported.reason,
        "mixers": list(supported.mixers),
    }
    if supported.profile is not None:
        from moelight.hrm.inventory import inventory

        parts, spec = inventory(supported.profile), supported.profile.experts
        result |= {
            "layers": supported.profile.num_layers,
            "moe_layers": supported.profile.num_moe_layers,
            "experts_per_layer": spec.num_experts,
            "experts_per_token": supported.profile.router.top_k,
            "experts": list(_form(supported)),
            "page_bytes": parts.page_bytes,
            "kv_token_bytes": parts.kv_token_bytes,
            "state_bytes": parts.state_bytes,
            "state_token_bytes": parts.state_token_bytes,
            "refused": list(supported.refused),
        }
    passed = verdict is not None and differs is None
    result["self_test"] = {"passed": passed, "error": verdict.error if verdict else None, "differs": differs}
    if verdict is None and differs is None:
        result["self_test"] = None
    return result


def _form(supported: Support) -> list[str]:
    """Describe the layout of the experts."""
    assert supported.profile is not None
    spec = supported.profile.experts
    words = {
        "gate and up of each expert": spec.gated and not spec.interleaved,
        "gate and up of each expert interleaved, row by row": spec.gated and spec.interleaved,
        "no gate": not spec.gated,
        "transposed": spec.transposed,
        "biases": spec.bias,
    }
    return [name for name, so in words.items() if so]


def _print(model: str, supported: Support, verdict: Verdict | None, differs: str | None) -> None:
    parts: list[Any] = [text((model, "bold"), "" if model == supported.model_type else f"  {supported.model_type}")]
    if supported.reason is not None:
        parts.append(text(("does not run: ", "red"), supported.reason))
    else:
        parts.append(indented(_facts(supported)))
        parts.append(section("refused with it", stacked(*map(text, supported.refused))))
    if differs is not None:
        parts.append(text(("self-test failed: ", "red"), differs))
    elif verdict is not None:
        parts.append(
            text(
                ("self-test passed", "bold"), f": largest error of logits {verdict.error:.1e}, greedy tokens identical"
            )
        )
    show(open_console(), *parts)


def _facts(supported: Support) -> View:
    from moelight.hrm.inventory import inventory

    profile = supported.profile
    assert profile is not None
    parts = inventory(profile)
    some = "" if all(profile.moe_layers) else f", {profile.num_moe_layers} of them"
    sizes = {
        "keys and values for each token" if profile.attention.latent is None else "latents for each token": (
            parts.kv_token_bytes
        ),
        "states for each sequence": parts.state_bytes,
        "states for each token": parts.state_token_bytes,
    }
    rows = {
        "runs": f"{supported.how}: {_HOW[supported.how]}",
        "mixers": ", ".join(supported.mixers),
        "layers": f"{profile.num_layers}{some} with {profile.experts.num_experts} experts, {profile.router.top_k} for "
        "each token",
        "experts": ", ".join(_form(supported)) + f"; {format_bytes(parts.page_bytes)} each, a page",
        "keeps": "; ".join(f"{format_bytes(size)} of {label}" for label, size in sizes.items() if size) or "nothing",
    }
    view = plain_table("", "", rows=((text((key, "dim")), value) for key, value in rows.items()))
    view.show_header = view.columns[-1].no_wrap = False
    return view
