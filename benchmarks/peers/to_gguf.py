"""A checkpoint of `make_checkpoint.py` as a GGUF file in bfloat16, by llama.cpp's own converter.

    HF/bin/python benchmarks/peers/to_gguf.py LLAMA.CPP-SOURCE MODEL OUT.gguf

The converter refuses tokenizers that it has not been told about; benchmarks feed ids, so any name of one will do.
Runs in an environment with torch, transformers, gguf and sentencepiece, without moelight.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    source, model, out = map(Path, sys.argv[1:])
    sys.path.insert(0, str(source))
    from conversion import base  # ty: ignore

    base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    unfinished = out.with_name(out.name + ".unfinished")
    sys.argv = ["convert_hf_to_gguf.py", str(model), "--outtype", "bf16", "--outfile", str(unfinished)]
    runpy.run_path(str(source / "convert_hf_to_gguf.py"), run_name="__main__")
    unfinished.rename(out)


if __name__ == "__main__":
    main()
