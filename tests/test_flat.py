"""All parameters in one vector: the gradients are those of one process, and one message per step carries them."""

import pytest
import torch
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.model import GPT
from manyhands.measure import wire
from manyhands.parallel.ddp import FlatReplicas
from rank_pool import run_on_ranks

pytestmark = pytest.mark.ranks

CONFIG = GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=2, n_embd=16, tie=True, qkv_bias=True)
BATCH, STEPS = 8, 3


def model():
    torch.manual_seed(3)
    return GPT(CONFIG).double()


def batch(step):
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(11, (BATCH, 9), generator=draw)
    return ids[:, :-1], ids[:, 1:]


def adamw(parts):
    groups = [{"params": [p], "weight_decay": 0.1 * decays} for p, decays in parts]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def one_process():
    single = model()
    optimizer = adamw([(p, p.ndim >= 2) for p in single.parameters()])
    gradients = []
    for step in range(STEPS):
        single(*batch(step))[1].backward()
        gradients.append({name: p.grad.clone() for name, p in single.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return gradients, {name: p.detach() for name, p in single.named_parameters()}


def flat_steps(ranks, micro_batches, drop_by_parameters=False):
    copy = model()
    replicas = FlatReplicas(copy)
    optimizer = adamw(replicas.parts)
    gradients, calls = [], []
    for step in range(STEPS):
        shares = [t.chunk(ranks.world_size)[ranks.rank].chunk(micro_batches) for t in batch(step)]
        with wire.watch() as seen:
            for i, (ids, targets) in enumerate(zip(*shares, strict=True)):
                last = i == micro_batches - 1
                replicas.backward(replicas(ids, targets, last=last)[1] / micro_batches, last)
        calls.append([(call.op, call.bytes) for call in seen.calls])
        gradients.append({name: p.grad.clone() for name, p in copy.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        if drop_by_parameters:
            copy.zero_grad()
    moments = [optimizer.state[part]["exp_avg"] for part, _ in replicas.parts]
    named = {name: replicas.view(name, moments).clone() for name in replicas.places}
    return gradients, {name: p.detach().clone() for name, p in copy.named_parameters()}, calls, named


@pytest.mark.parametrize(("n", "micro_batches", "drop"), [(1, 2, False), (2, 1, True), (2, 2, False), (4, 1, False)])
def test_gradients_and_weights_are_those_of_one_process_tied_ones_too(n, micro_batches, drop):
    gradients, weights = one_process()
    for seen, ended, calls, _ in run_on_ranks(n, flat_steps, micro_batches, drop):
        for step in range(STEPS):
            for name, wanted in gradients[step].items():
                torch.testing.assert_close(seen[step][name], wanted, rtol=0, atol=1e-12)
        for name, wanted in weights.items():
            torch.testing.assert_close(ended[name], wanted, rtol=0, atol=1e-12)
        num_params = sum(p.numel() for p in weights.values())
        one_message = [("all_reduce", 8 * num_params)]
        assert calls == [one_message if n > 1 else []] * STEPS


def test_moments_are_found_by_the_names_of_their_parameters():
    single = model()
    optimizer = adamw([(p, p.ndim >= 2) for p in single.parameters()])
    for step in range(STEPS):
        single(*batch(step))[1].backward()
        optimizer.step()
        optimizer.zero_grad()
    named = run_on_ranks(2, flat_steps, 1)[0][3]
    for name, parameter in single.named_parameters():
        torch.testing.assert_close(named[name], optimizer.state[parameter]["exp_avg"], rtol=0, atol=1e-12)
