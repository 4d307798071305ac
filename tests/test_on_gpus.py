"""What only GPUs can show: `make test-gpu` on a node that has some. It takes minutes, and up to 4 of the GPUs.

Elsewhere the same lines run on the stand-in device and on gloo, which know no kernels, streams, NCCL or allocator.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ASKED, ROOT
from manyhands.course.lessons import find_lessons
from manyhands.launch.devices import BACKENDS
from manyhands.launch.metrics import compare
from manyhands.tools.lesson_run import Run

pytestmark = pytest.mark.timeout(1800)
LESSONS = find_lessons(ROOT, own=False)
RANKS = """
import json, sys, torch, torch.distributed as dist
sys.path.insert(0, "scripts")
from manyhands import join, leave
from manyhands.measure import wire
from manyhands.measure.timing import synchronise
def free():
    synchronise(ranks.device)
    return torch.get_device_module(ranks.device).mem_get_info()[0]
"""
# a second join in one process, a sub-mesh, groups as lesson 05 makes them, and what is counted of a call
JOINS = """
for turn in range(2):
    ranks = join(name="joins", quiet=True)
    n, before, used = ranks.world_size, free(), []
    x_N = torch.full((2**20,), ranks.rank + 1.0, device=ranks.device)
    with wire.watch(sockets=True) as seen:
        dist.all_reduce(x_N)
    for size in range(1, n + 1):
        group, was = dist.new_group(range(size)), free()
        if ranks.rank < size:
            dist.all_reduce(torch.ones(2**20, device=ranks.device), group=group)
        used.append(was - free())
    part = torch.ones(2, device=ranks.device)
    dist.all_reduce(part, group=dist.new_subgroups(1)[0])
    if ranks.rank == 0:
        print(json.dumps({"sums": sorted(set(x_N.tolist())), "alone": part.tolist(), "used": used,
                          "payload": seen.payload_bytes("all_reduce"), "sockets": seen.transport_bytes}), flush=True)
    leave()
"""
# a training step under a MemoryTimeline, beside what the allocator says
MEMORY = """
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure.memory_timeline import MemoryTimeline
ranks = join(name="memory", quiet=True)
device = torch.get_device_module(ranks.device)
model = GPT(GPTConfig(vocab_size=512, block_size=256, n_layer=8, n_head=8, n_embd=512)).to(ranks.device)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ids_BT = torch.randint(512, (16, 256), device=ranks.device)
for turn in range(2):  # the first one warms up
    synchronise(ranks.device)
    device.reset_peak_memory_stats()
    with MemoryTimeline(model, optimizer) as seen:
        model(ids_BT, ids_BT)[1].backward()
        optimizer.step()
        optimizer.zero_grad()
print(json.dumps({"seen": seen.peak.total, "allocated": device.max_memory_allocated()}), flush=True)
leave()
"""

# losses and gradients of attention within documents: by the whole mask, and by FlexAttention's blocks
DOCUMENTS = """
from functools import partial
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT, create_block_mask, document_blocks
ranks = join(name="documents", quiet=True)
ids_BT, seen = torch.randint(64, (4, 301), generator=torch.Generator().manual_seed(1)).to(ranks.device), []
for by_blocks in (False, True):
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab_size=64, block_size=300, n_layer=2, n_embd=256, separator=3)).to(ranks.device)
    if by_blocks:
        gpt.allowed = partial(document_blocks, make=torch.compile(create_block_mask))
        for block in gpt.blocks:
            block.compile()
    loss = gpt(ids_BT[:, :-1], ids_BT[:, 1:])[1]
    loss.backward()
    seen.append([loss.detach(), *(p.grad for p in gpt.parameters())])
print(json.dumps({"apart": max((a - b).abs().max().item() for a, b in zip(*seen))}), flush=True)
leave()
"""

# the ring of two ranks that share a GPU, each a thread, by products and by FlashAttention, beside plain attention
RING = """
import queue, time
from concurrent.futures import ThreadPoolExecutor
import torch.nn.functional as F
from manyhands.parallel import context
ranks = join(name="ring", quiet=True)
class Rank:
    def __init__(self, rank):
        self.rank, self.size, self.box = lambda: rank, lambda: 2, queue.Queue()
    def save_for_backward(self, *tensors):
        self.saved_tensors = tensors
pair = [Rank(0), Rank(1)]
def pass_on(x, group):
    pair[1 - group.rank()].box.put(x.contiguous())
    return lambda: group.box.get(timeout=60)
context._pass_on = pass_on
def both(q, k, v, d_out, kind):
    context._is_flash = lambda *_: kind == "flash"
    T, pool = q.shape[2], ThreadPoolExecutor(2)
    at = [context.zig_zag(T, 2, rank).to(q.device) for rank in range(2)]
    def run(rank):
        here = [x[:, :, at[rank]] for x in (q, k, v, d_out)]
        grouped = here[0].unflatten(1, (k.shape[1], -1))
        out = context._Ring.forward(pair[rank], grouped, *here[1:3], pair[rank], None)
        d_q, *d_kv, _, _ = context._Ring.backward(pair[rank], here[3].unflatten(1, (k.shape[1], -1)))
        return out.flatten(1, 2), d_q.flatten(1, 2), *d_kv
    parts, order = list(pool.map(run, range(2))), torch.cat(at).argsort()
    return [torch.cat(x, 2)[:, :, order] for x in zip(*parts)]
def draw(B, h, g, T, K):
    return [torch.randn(B, n, T, K, device=ranks.device).bfloat16() for n in (h, g, g, h)]
torch.manual_seed(0)
said = {}
for heads in (4, 2):
    q, k, v, d_out = draw(2, 4, heads, 512, 64)
    whole = [x.float().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
    out.backward(d_out.float())
    for kind in KINDS:
        pairs = zip(both(q, k, v, d_out, kind), [out, *(x.grad for x in whole)])
        said[f"{kind} {heads}"] = [(x - y).norm().item() / y.norm().item() for x, y in pairs]
given = draw(1, 16, 16, LONG, 64)
for kind in KINDS * 2:  # the first one warms up
    synchronise(ranks.device)
    begun = time.perf_counter()
    both(*given, kind)
    synchronise(ranks.device)
    said[f"{kind} s"] = time.perf_counter() - begun
print(json.dumps(said), flush=True)
leave()
"""


def torchrun(n, arguments, outputs):
    """What n ranks printed. They take GPUs, or fail."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n), *arguments]
    environ = os.environ | {"MANYHANDS_OUTPUTS": str(outputs), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def printed(n, code, folder):
    """The JSON lines of a program on n ranks."""
    (folder / "program.py").write_text(RANKS + code)
    lines = torchrun(n, [str(folder / "program.py")], folder).splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]


def test_ranks_join_twice_and_what_they_send_is_counted_and_groups_are_small(gpus, tmp_path):
    n = min(gpus, 4)
    for said in printed(n, JOINS, tmp_path):
        assert said["sums"] == [n * (n + 1) / 2] and said["alone"] == [1, 1]
        assert said["payload"] == 4 * 2**20 and said["sockets"] is None  # not a byte of a GPU's tensor is sought there
        assert max(said["used"]) < 2**30, f"groups take {said['used']} bytes of the GPU"


def test_a_memory_timeline_sees_what_the_allocator_has_handed_out(gpus, tmp_path):
    """Within 5 %: the allocator rounds up to 512 bytes, and operators have workspace of their own."""
    (said,) = printed(1, MEMORY, tmp_path)
    assert 0.95 * said["allocated"] < said["seen"] < 1.05 * said["allocated"]


def test_flexattention_computes_what_the_whole_mask_does(gpus, tmp_path):
    (said,) = printed(1, DOCUMENTS, tmp_path)
    assert said["apart"] < 1e-3


def test_the_ring_of_flash_attention_computes_what_the_ring_of_products_does(gpus, tmp_path):
    """Within bf16, for as many heads of keys as of queries and for half of them; what it gains is printed."""
    (said,) = printed(1, "KINDS, LONG = ['plain', 'flash'], 16384" + RING, tmp_path)
    print(f"a step of 16,384 positions: {said['plain s'] / said['flash s']:.1f} times as fast by FlashAttention")
    for heads in (4, 2):
        assert max(said[f"plain {heads}"]) < 0.01 and max(said[f"flash {heads}"]) < 0.01


@pytest.mark.parametrize(
    "flags",
    [
        "--parallel.strategy fsdp --parallel.offload --checkpoint.asynchronous",
        "--parallel.strategy zero1 --checkpoint.asynchronous",
        "--train.compile",
        "--model.dropout 0.1",  # played back from a CUDA graph, with other masks in each step
    ],
)
def test_the_trainer_saves_in_bf16_and_goes_on_as_if_nothing_had_been(gpus, flags, tmp_path):
    n = min(gpus, 4)
    train = ["scripts/train.py", "--model.n-layer", "2", "--train.precision", "bf16", "--train.global-batch", "12"]
    train += ["--optimizer.warmup", "2", "--checkpoint.every", "4", "--log.eval-every", "4", "--log.eval-batches", "2"]
    train += ["--log.no-plots", *flags.split()]

    def losses(steps, folder, outputs):
        torchrun(n, [*train, "--train.steps", str(steps), "--checkpoint.folder", str(folder)], outputs)
        content = json.loads((Path(outputs) / "train" / "latest" / "metrics.json").read_text())
        assert content["backend"] == BACKENDS[ASKED]
        return content["exact"]["val_losses"]

    whole = losses(8, tmp_path / "whole", tmp_path / "a")
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole" / "step-00000004").rename(tmp_path / "cut" / "step-00000004")
    train += ["--checkpoint.resume", "must"]
    resumed = losses(8, tmp_path / "cut", tmp_path / "b")
    assert whole["8"] < whole["0"] and resumed["8"] == pytest.approx(whole["8"], abs=2e-3)


def losses_of(n, flags, outputs):
    """The validation losses of 6 steps of the trainer, in float32 as it is."""
    train = [
        "scripts/train.py",
        "--model.n-layer",
        "2",
        "--train.no-tf32",
        "--train.steps",
        "6",
        "--optimizer.warmup",
        "2",
    ]
    train += ["--train.global-batch", "12", "--log.eval-every", "2", "--log.eval-batches", "2", "--log.no-plots"]
    torchrun(n, [*train, *flags.split()], outputs)
    return json.loads((Path(outputs) / "train" / "latest" / "metrics.json").read_text())["exact"]["val_losses"]


@pytest.mark.parametrize("flags", ["", "--train.micro-batch 3", "--train.compile", "--model.tie --model.qkv-bias"])
def test_steps_that_are_played_back_learn_what_others_do(gpus, flags, tmp_path):
    n = 1 if gpus < 4 else 4
    played = losses_of(n, flags, tmp_path / "a")
    assert played == pytest.approx(losses_of(n, f"{flags} --train.no-cuda-graphs", tmp_path / "b"), abs=2e-5)
    assert played["6"] < played["0"] - 0.1


def test_experts_in_one_product_learn_what_experts_in_turn_do(gpus, tmp_path):
    """bf16 takes a grouped product, float32 one expert after the other."""
    flags = "--model.experts 4 --model.shared-experts 1"
    exact = losses_of(1, flags, tmp_path / "a")
    assert losses_of(1, f"{flags} --train.precision bf16", tmp_path / "b") == pytest.approx(exact, abs=2e-2)


# the longest last: what only several ranks over NCCL can show comes first
@pytest.mark.lesson
@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.name)
def test_a_lesson_gives_the_same_numbers_twice_over_nccl(gpus, lesson, tmp_path):
    """On all GPUs, then on all again: another join, another communicator. On one: as on all, for the same batch."""
    n, found = min(gpus, 4), []
    for turn, ranks in enumerate((n, n, 1)):
        run = Run(lesson, "torchrun", ranks, tmp_path / str(turn), lesson.short, ASKED)
        outcome = run.carry_out(timeout_s=600)
        assert not outcome.error, f"{outcome.error}\n{outcome.error.detail}"
        assert outcome.metrics["backend"] == BACKENDS[ASKED]
        found.append(outcome.metrics)
    assert compare(found[0], found[1]) == []
    if lesson.number in ("02", "03"):
        assert compare(found[0], found[2]) == []
