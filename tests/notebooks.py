"""Runs the notebooks of examples/notebooks without a kernel: `make notebooks` writes what comes out into them.

    python -m tests.notebooks [NOTEBOOK ...]

A line that begins with ``!moelight`` is that command, with names in braces replaced; the rest of a cell is Python.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from tests.cli.program import ROOT, moelight_inside

NOTEBOOKS = ROOT / "examples" / "notebooks"
WIDTH = "100"
TEMPORARY = re.compile(re.escape(tempfile.gettempdir()) + r"/tmp\w+")


class CellError(Exception):
    """A command of a cell ended with an error."""


class _Image:
    def __init__(self, filename: str) -> None:
        self.data = Path(filename).read_bytes()


def run(notebook: Path) -> dict[str, Any]:
    """The notebook with what its cells write now. Raises what a cell raises, and CellError."""
    result: dict[str, Any] = json.loads(notebook.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    with _inside(notebook.parent):
        cells = [cell for cell in result["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(cells, start=1):
            cell["outputs"], cell["execution_count"] = _outputs("".join(cell["source"]), names, number), number
    return result


@contextlib.contextmanager
def _inside(directory: Path) -> Iterator[None]:
    """In ``directory``, where IPython's display makes what is kept here."""
    display, parent = ModuleType("IPython.display"), ModuleType("IPython")
    display.Image, parent.version_info = _Image, (9, 0)  # type: ignore[attr-defined]
    before = Path.cwd()
    modules = {"IPython": parent, "IPython.display": display}
    replaced = {name: sys.modules.get(name) for name in modules}
    with mock.patch.dict(os.environ, {"COLUMNS": WIDTH, "HF_HUB_OFFLINE": "1"}):
        sys.modules.update(modules)
        os.chdir(directory)
        try:
            yield
        finally:
            os.chdir(before)
            for name, module in replaced.items():
                sys.modules.pop(name)
                if module is not None:
                    sys.modules[name] = module


def _outputs(source: str, names: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """What a cell writes, and the image that its last line shows."""
    written, shown = io.StringIO(), None
    with contextlib.redirect_stdout(written):
        for part in re.split(r"(?m)^(!.*)$", source):
            if part.startswith("!"):
                written.write(_command(part[1:], names))
            else:
                shown = _executed(part, names)
    result: list[dict[str, Any]] = []
    if text := TEMPORARY.sub("/tmp/job", written.getvalue()):
        result.append({"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)})
    if shown is not None:
        data = {
            "image/png": base64.b64encode(shown.data).decode(),
            "text/plain": ["<IPython.core.display.Image object>"],
        }
        result.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
    return result


def _executed(part: str, names: dict[str, Any]) -> _Image | None:
    """Execute Python; returns the image of a last line that is one."""
    body, _, last = part.rstrip().rpartition("\n")
    if last.startswith("Image("):
        exec(body, names)  # noqa: S102
        image: _Image = eval(last, names)  # noqa: S307
        return image
    exec(part, names)  # noqa: S102
    return None


def _command(line: str, names: dict[str, Any]) -> str:
    words = shlex.split(re.sub(r"\{(\w+)\}", lambda match: str(names[match[1]]), line))
    if words[:1] != ["moelight"]:
        raise CellError(f"{line}: only moelight is run")
    done = moelight_inside(*words[1:])
    if done.returncode:
        raise CellError(f"{line}: exit code {done.returncode}\n{done.stderr}")
    return done.stdout + done.stderr


def main(paths: list[str]) -> int:
    for path in map(Path, paths or sorted(NOTEBOOKS.glob("*.ipynb"))):
        notebook = run(path.resolve())
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"{path.name}: {sum(cell['cell_type'] == 'code' for cell in notebook['cells'])} cells")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
