"""The Python of assets/site/recipes.md runs on two ranks and does what its sentence says."""

import re
import subprocess
import sys

import pytest
from manyhands.course.folders import ROOT

TEXT = (ROOT / "assets" / "site" / "recipes.md").read_text("utf-8")
BEFORE = """
import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, path = dist.get_rank(), sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(3, 2, bias=False)
whole = model.weight.detach().clone()
ddp = DistributedDataParallel(model)
sharded = fully_shard(torch.nn.Linear(3, 2, bias=False))
dataset = TensorDataset(torch.arange(17))
loss_fn = torch.nn.functional.mse_loss
x = torch.ones(4, 3)
micro_batches = [(torch.full((4, 3), rank + step + 1.0), torch.zeros(4, 2)) for step in range(3)]
loss_sum, num_tokens = [(10.0, 5), (2.0, 10)][rank]
"""
AFTER = """
assert mean_loss == 12 / 15
gradients = [torch.autograd.grad(loss_fn(torch.full((4, 3), r + s + 1.0) @ (w := whole.clone().requires_grad_()).T,
             torch.zeros(4, 2)), w)[0] for r in range(2) for s in range(3)]
assert torch.allclose(model.weight.grad, sum(gradients) / 6)
orders = []
for epoch in range(2):
    sampler.set_epoch(epoch)
    mine = torch.tensor(list(sampler))
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert len(set(torch.cat(both).tolist())) == 16
    orders.append(mine.tolist())
assert orders[0] != orders[1]
assert 0 < norm.full_tensor().item() and sharded.weight.grad.full_tensor().norm() <= 1.0001
full = sharded.weight.full_tensor()
assert rank or torch.equal(torch.load(path)["weight"], full)
assert median_s(lambda: dist.all_reduce(x)) > 0
print("all of it ran\\n", end="", flush=True)
dist.destroy_process_group()
"""


def test_there_are_twenty_recipes_each_short_and_with_a_link():
    recipes = re.split(r"^## .*\n", TEXT, flags=re.M)[1:]
    assert len(recipes) == 20
    assert [one for one in recipes if not (re.search(r"\]\([^)]+\)|make reset|checkpoint.resume", one))] == []
    assert all(len(re.findall(r"^.+$", block, re.M)) <= 9 for block in re.findall(r"```python\n(.*?)```", TEXT, re.S))


@pytest.mark.ranks
def test_the_code_of_the_recipes_does_what_its_sentences_say(tmp_path):
    script = tmp_path / "recipes.py"
    script.write_text(BEFORE + "\n".join(re.findall(r"```python\n(.*?)```", TEXT, re.S)) + AFTER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(tmp_path / "state.pt")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all of it ran") == 2 and done.stdout.count("the whole world sees this once") == 1
    assert done.stdout.count("0 away from rank 0") == 2
