"""The least device memory: what a refusal names must then be enough to run with."""

from __future__ import annotations

import json
from typing import Any

from gpu_sections.setting import FailedError, Setting, TimeOverError
from gpu_sections.shapes import MODELS, ORDERS, generate, least_memory, make_model
from moelight.core.units import format_bytes, parse_bytes


def run(setting: Setting) -> None:
    """The first model in every order."""
    model = make_model(setting, MODELS[0])
    count, new = (4, 4) if setting.small else (64, 12)
    for order in ORDERS:
        row: dict[str, Any] = {"model": model.name, "order": order}
        try:
            refused = generate(setting, model, order, "1", count, new, f"least-{order}")
            named = least_memory(refused)
            if named is None:
                raise FailedError(f"one byte was not refused as it should be: {refused.why}")
            row["least_bytes"] = parse_bytes(named)
            generate(setting, model, order, named, count, new, f"least-{order}").check()
            stats = json.loads((setting.scratch / f"least-{order}.stats.json").read_text())
            row |= {"device_peak_bytes": stats["device_peak_bytes"], "passes": stats["passes"]}
        except TimeOverError:
            raise
        except FailedError as error:
            row["unable"] = str(error)
        setting.add_row(**row)


def lines(figures: dict[str, Any]) -> list[str]:
    """For the summary."""
    told = []
    for row in figures.get("rows", []):
        least = format_bytes(row["least_bytes"]) if "least_bytes" in row else "no figure"
        took = f"runs; the allocator took {format_bytes(row.get('device_peak_bytes', 0))}"
        told.append(f"{row['model']}, {row['order']}: {least}: {row.get('unable', took)}")
    return told
