"""A few clipped steps of a small GPT under a strategy, and the same by torch in one process: they must be equal."""

from dataclasses import replace

import torch
from manyhands.config.layout import resolve_layout
from manyhands.config.options import Options, ParallelOptions, TrainOptions
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.experts import move_biases
from manyhands.gpt.model import GPT, experts_of

CONFIG = GPTConfig(vocab_size=65, block_size=16, n_layer=4, n_head=4, n_embd=32)
LLAMA = replace(
    CONFIG, style="llama", n_kv_head=2, n_hidden=50, head_dim=10, tie=True, rope_factor=8.0, rope_original=8
)
OLMO = replace(CONFIG, style="llama", norm="layer", clip_qkv=0.02)
TIED = replace(CONFIG, tie=True, qkv_bias=True)
STEPS, BATCH, LR, ADAM_LR, MAX_NORM = 2, 8, 0.5, 1e-3, 0.1
EXACT = 1e-10  # float64, SGD, relative to max(1, |expected|)


def options_of(precision="fp64", micro_batch=None, compile=False, **parallel):
    train = TrainOptions(global_batch=BATCH, micro_batch=micro_batch, precision=precision, compile=compile)
    return Options(train=train, parallel=ParallelOptions(**parallel))


def batches(config=CONFIG):
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        ids = torch.randint(config.vocab_size, (BATCH, config.block_size + 1), generator=draw)
        yield ids[:, :-1], ids[:, 1:]


def build(ranks, options, config=CONFIG):
    """The GPT under the options' strategy."""
    from manyhands.parallel.strategy import parallelize

    return parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks)


def share(parallel, *tensors):
    """What a rank works on of tensors that all ranks hold."""
    return [tensor.chunk(parallel.data_size)[parallel.data_rank] for tensor in tensors]


def optimizer_by(make, parameters, options):
    """SGD in float64, else AdamW; `make(kind, groups, **settings)`."""
    groups = [{"params": list(parameters)}]
    if options.train.precision == "fp64":
        return make(torch.optim.SGD, groups, lr=LR)
    return make(torch.optim.AdamW, groups, lr=ADAM_LR, weight_decay=0, foreach=False)


def steps_of(ranks, options, config=CONFIG, between=None, looks=True):
    """What each step showed on this rank, and the weights after the last. `between(parallel)` is called after each.

    `looks`: whether the model is evaluated before the first step and asked for logits after it: the second one and the
    weights show whether anything of that stayed.
    """
    parallel = build(ranks, options, config)
    optimizer = optimizer_by(parallel.make_optimizer, parallel.named_parameters().values(), options)
    seen = []
    for ids, targets in batches(config):
        own, looks = share(parallel, ids, targets), looks and not seen
        step = {"validation loss": parallel.mean_loss(parallel.evaluate(*own))} if looks else {}
        step["loss"] = parallel.mean_loss(parallel.forward_backward(*own))
        step |= {} if seen else parallel.named_full_gradients()  # those of the second step are in the weights
        step["norm"] = parallel.clip(MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if (busiest := parallel.balance()) is not None:
            step["busiest"] = busiest
        if looks:
            step["logits"] = parallel.logits(ids[:2, :5])
        seen.append(step)
        if between:
            between(parallel)
    weights = parallel.named_full_parameters()
    weights |= {f"{name}.bias": layer.bias.clone() for name, layer in parallel.experts().items()}
    return {"steps": seen, "weights": weights, "names": list(parallel.named_parameters())}


def one_process(options, config=CONFIG):
    """The same by torch alone: no ranks, nothing of the package but the model."""
    torch.manual_seed(options.train.seed)
    model = GPT(config).to(torch.float64 if options.train.precision == "fp64" else torch.float32)
    optimizer = optimizer_by(lambda kind, groups, **settings: kind(groups, **settings), model.parameters(), options)
    model.balance_loss, seen = options.optimizer.balance_loss, []
    for ids, targets in batches(config):
        _, loss = model(ids, targets)
        loss.backward()
        step = {"validation loss": loss.detach(), "loss": loss.detach()}
        step |= {name: p.grad.clone() for name, p in model.named_parameters()}
        step["norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        if layers := experts_of(model):
            chosen_NE = torch.stack([layer.chosen for layer in layers])
            step["busiest"] = move_biases(layers, chosen_NE, options.optimizer.balance_speed)
        with torch.no_grad():
            step["logits"] = model.eval()(ids[:2, :5])[0]
            model.train()
        seen.append(step)
    weights = {name: tensor.detach() for name, tensor in model.state_dict(keep_vars=True).items()}
    weights = {name: weights[name] for name in weights if name != "head.weight" or not config.tie}
    return {"steps": seen, "weights": weights, "names": list(weights)}


def farthest(seen, expected):
    """The largest difference, relative to max(1, |expected|), and where it is."""
    assert seen.keys() <= expected.keys()
    apart = {
        n: ((value - expected[n]).abs() / expected[n].abs().clamp(min=1)).max().item() for n, value in seen.items()
    }
    return max((value, name) for name, value in apart.items())


def assert_equal(results, expected, budget=EXACT):
    """The results of all ranks are those of one process."""
    for rank, result in enumerate(results):
        assert set(result["names"]) <= set(expected["names"])
        assert expected["steps"][0].keys() - result["steps"][0].keys() <= {"validation loss", "logits"}
        elsewhere = {name for name in expected["names"] if name.endswith(".router")} - set(result["names"])
        biases = {name.replace(".router", ".bias") for name in elsewhere}  # of other stages' experts
        assert expected["weights"].keys() - result["weights"].keys() == biases
        for step, (seen, wanted) in enumerate(zip(result["steps"], expected["steps"], strict=True)):
            apart, name = farthest(seen, wanted)
            assert apart <= budget, f"rank {rank}, step {step}: {name} is {apart} away"
        assert farthest(result["weights"], expected["weights"])[0] <= budget
