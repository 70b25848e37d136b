#!/usr/bin/env bash
# torch.distributed, gloo, tensors of a layer's rows gathered between processes that share a model: the documentation of
# all_gather_single lets the output be a concatenation or a stack of the inputs along a new first dimension. By that
# one would expect [2, 3, 4] to take two inputs [3, 4]; gloo refuses the stack ("invalid tensor size") and
# takes only the concatenation [6, 4], though both have the same bytes in the same order. all_gather into the views of the
# stack works. Exits non-zero if that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'torch==2.13.0' 'numpy==2.2.6'
cat > "$folder/rank.py" <<'PY'
import sys

import torch
from torch import distributed

rank, meeting = int(sys.argv[1]), sys.argv[2]
assert "torch.stack" in distributed.all_gather_single.__doc__
distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
part = torch.full((3, 4), float(rank))
both = torch.cat((torch.zeros(3, 4), torch.ones(3, 4)))

joined = torch.empty(6, 4)
distributed.all_gather_single(joined, part)
assert torch.equal(joined, both)

stacked = torch.empty(2, 3, 4)
try:
    distributed.all_gather_single(stacked, part)
    raise SystemExit("gloo takes a stack now")
except (RuntimeError, ValueError) as error:
    message = f"{type(error).__name__}: {error}"
assert "invalid tensor size" in message, message

distributed.all_gather(list(stacked.unbind()), part)
assert torch.equal(stacked.flatten(0, 1), both)
if rank == 0:
    print(f"torch {torch.__version__}: {message}")
distributed.barrier()
distributed.destroy_process_group()
PY
export GLOO_SOCKET_IFNAME=lo OMP_NUM_THREADS=1
"$folder/venv/bin/python" "$folder/rank.py" 1 "$folder/meeting" &
"$folder/venv/bin/python" "$folder/rank.py" 0 "$folder/meeting"
wait $!
