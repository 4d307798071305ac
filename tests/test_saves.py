"""Every layout's save holds each number once and in its place, and other ranks read it back, or it is refused.

Weights and moments hold their own places in the whole, so that pieces that are lost, doubled or swapped are seen.
"""

import random
import shlex
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from manyhands.checkpoint import checkpoints as checkpoint_module
from manyhands.checkpoint.checkpoints import Checkpoints, own_chunk, whole_tensors
from manyhands.config.layout import LayoutError, resolve_layout
from manyhands.config.options import model_config, read_options
from manyhands.gpt.experts import Experts
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.strategy import full_model
from manyhands.train import dry_run
from rank_pool import run_on_ranks
from test_checkpoint import about, error_of, names_in
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

pytestmark = pytest.mark.ranks

TINY = "--model.n-layer 4 --model.n-head 4 --model.n-embd 8 --model.block-size 8 --train.global-batch 32"
# {model: flags}; 35, 65 and 50,257 tokens do not split evenly over 2 or 4 ranks
EXPERTS = {1: "", 4: "--model.experts 4 --model.shared-experts 1 --optimizer.balance-loss 0"}
STYLES = {"gpt": "", "llama": "--model.style llama --model.n-kv-head 2 --model.n-hidden 12"}
# layouts to read with, by their number of ranks
READERS = {
    1: "", 2: "--parallel.strategy fsdp", 4: "--parallel.strategy fsdp --parallel.tensor 2",
    8: "--parallel.strategy pp --parallel.tensor 4",
}  # fmt: skip

# what is refused, before a step is made: {the sentence's beginning: (why, an example on 8 ranks)}
REFUSED = {
    "zero1 shards the optimizer over replicas only": (
        "torch's ZeRO-1 shares out whole weights, and these are cut", "--parallel.strategy zero1 --parallel.tensor 2",
    ),
    "zero1 shares out whole weights, and parallel.expert": (
        "likewise: experts are cut", "--parallel.strategy zero1 --model.experts 4 --parallel.expert 2",
    ),
    "parallel.context=2 does not run inside a pipeline": (
        "a stage's attention is its rank's own", "--parallel.strategy fsdp --parallel.pipeline 2 --parallel.context 2",
    ),
    "model.experts=4 does not split over parallel.expert=2 x 4 tensor ranks": (
        "ranks hold whole experts", "--parallel.tensor 4 --model.experts 4 --parallel.expert 2",
    ),
    "1 data ranks do not split into groups of parallel.expert=2": (
        "experts are spread over data ranks", "--parallel.strategy pp --model.experts 4 --parallel.expert 2",
    ),
    "model.vocab_size=5 tokens, 2 for each of 4 tensor ranks": (
        "each tensor rank has some of the tokens", "--parallel.tensor 4 --model.vocab-size 5",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A model, the layout that saves it, and the number of ranks that read it."""

    name: str
    n: int  # ranks
    layout: str
    vocab: int
    tie: bool = False
    experts: int = 1
    m: int = 1  # ranks that read
    style: str = "gpt"

    @property
    def model(self):
        tie, experts = "--model.tie" if self.tie else "--model.no-tie", EXPERTS[self.experts]
        if self.style == "llama":  # which has no shared ones
            experts = experts.replace("--model.shared-experts 1", "")
        return f"{TINY} {tie} {experts} {STYLES[self.style]}"


def drawn(seed):
    """A layout whose numbers of ranks fit together."""
    draw = random.Random(seed)
    strategy = draw.choice(("fsdp",) * 5 + ("ddp", "ddp", "tp", "pp", "zero1"))
    n = draw.choice((2, 4) if strategy in ("tp", "pp") else (2, 4, 8, 8))  # 4 layers, 4 heads
    tie, experts = draw.random() < 0.25, draw.choice((1, 1, 4))
    vocab = draw.choice((65, 35, 50257))
    layout, left = [f"--parallel.strategy {strategy}"], n
    likely = {"tensor": 0.6, "pipeline": 0.25, "context": 0.25, "expert": 0.5 * (experts > 1)}
    for axis in likely if strategy in ("fsdp", "ddp") else ("tensor",) if strategy == "pp" else ():
        sizes = [size for size in (2, 4) if left % size == 0 and (size < 4 or axis == "tensor")]
        if sizes and draw.random() < likely[axis]:
            size = draw.choice(sizes)
            layout.append(f"--parallel.{axis} {size}")
            left //= size if axis != "expert" else 1
    if strategy == "fsdp":
        layout.append(f"--parallel.sharding {draw.choice(('full', 'full', 'grad_op', 'hybrid'))}")
    m = draw.choice([m for m in READERS if m != n])
    return Case(f"drawn {seed}", n, " ".join(layout), vocab, tie, experts, m, draw.choice(tuple(STYLES)))


FIXED = [
    Case("8 ranks, tensor 2, 65 tokens", 8, "--parallel.strategy fsdp --parallel.tensor 2", 65, m=2),
    Case("8 ranks, tensor 4, 35 tokens", 8, "--parallel.strategy fsdp --parallel.tensor 4", 35, m=4),
    Case("8 ranks, tensor 4, gpt2's tokens, tied", 8, "--parallel.strategy fsdp --parallel.tensor 4", 50257, True, m=4),
    Case("8 ranks, tensor 2, gpt2's tokens", 8, "--parallel.strategy fsdp --parallel.tensor 2", 50257, m=1),
    Case("tied stages", 4, "--parallel.strategy fsdp --parallel.pipeline 2", 35, True, m=8),
    Case(
        "tied, in a V",
        4,
        "--parallel.strategy fsdp --parallel.pipeline 2 --parallel.sharding grad_op --parallel.schedule ZBVZeroBubble",
        65,
        True,
        m=8,
        style="llama",
    ),
    Case("a llama, context", 4, "--parallel.strategy fsdp --parallel.context 2", 35, True, m=2, style="llama"),
    # two ranks hold each head of keys
    Case("a llama, tensor 4", 8, "--parallel.strategy fsdp --parallel.tensor 4", 65, True, m=2, style="llama"),
    Case("a llama, read on tensor 4", 4, "--parallel.strategy pp --parallel.tensor 2", 35, m=8, style="llama"),
]
DRAWN = list(map(drawn, range(225)))


def _placed(config, options):
    """The whole GPT, each number of which says where it stands, counted through the weights in the order of names."""
    model = full_model(config, options)
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    start = 0
    for tensor in [*(p for _, p in sorted(model.named_parameters())), *(layer.bias for layer in layers)]:
        tensor.data = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        start += tensor.numel()
    return model


def _spread(case, layout, ranks):
    """The case's model on these ranks, and its state: {name: tensor}; moments are -place and place + 0.5."""
    model = dry_run.model_from_flags(f"{case.model} {layout}", ranks, case.vocab, _placed)
    tensors = model.parallel.checkpoint_tensors(model.optimizer)
    for name, tensor in tensors.items():
        stem, _, slot = name.removeprefix("optimizer.").rpartition(".")
        if slot in ("exp_avg", "exp_avg_sq"):
            place = local_part(tensors[f"model.{stem}"])
            local_part(tensor).copy_(-place if slot == "exp_avg" else place + 0.5)
    return tensors


def _save_all(ranks, folder, cases):
    """Per case: None, or what the layout was refused with."""
    refused = []
    for case in cases:
        try:
            tensors = _spread(case, case.layout, ranks)
        except LayoutError as error:
            refused.append(str(error))
            continue
        checkpoints = Checkpoints(folder / case.name, ranks)
        checkpoints.save(1, tensors, about(ranks, 1))
        checkpoints.close()
        refused.append(None)
    return refused


def _read_all(ranks, folder, cases):
    """[(case, name)] of what did not come back as it was."""
    wrong = []
    for case in cases:
        right = _spread(case, READERS[ranks.world_size], ranks)
        tensors = {name: tensor.clone() for name, tensor in right.items()}
        for tensor in tensors.values():
            local_part(tensor).fill_(-1.5)
        checkpoints = Checkpoints(folder / case.name, ranks)
        checkpoints.load(checkpoints.newest(), tensors)
        checkpoints.close()
        wrong += [
            (case.name, name) for name in right if not torch.equal(local_part(tensors[name]), local_part(right[name]))
        ]
    return wrong


def _expected(case):
    """{name: whole tensor} of a case's checkpoint."""
    options = read_options(shlex.split(case.model))
    model = _placed(model_config(options, case.vocab), options)
    weights = dict(model.named_parameters()) | {
        f"{name}.bias": layer.bias for name, layer in model.named_modules() if isinstance(layer, Experts)
    }
    found = {f"model.{name}": tensor.detach() for name, tensor in weights.items()}
    for name, tensor in model.named_parameters():
        found[f"optimizer.{name}.exp_avg"] = -tensor.detach()
        found[f"optimizer.{name}.exp_avg_sq"] = tensor.detach() + 0.5
        found[f"optimizer.{name}.step"] = torch.zeros(())
    return found


def _refused(flags, n):
    """What a run with these flags is refused with on n ranks, by the trainer before it builds, and by the dry run."""
    options, said = read_options(shlex.split(flags)), []
    config = model_config(options, options.model.vocab_size)
    for refuse in (lambda: resolve_layout(options, config, n), lambda: dry_run.describe(options, n, n)):
        with pytest.raises(LayoutError) as refused:
            refuse()
        said.append(str(refused.value))
    assert said[0] == said[1]
    return said[0]


def _with_a_wrong_plan(ranks, folder):
    """The two ranks have 4 and 3 of 7 numbers, and the second is told to write behind the third."""
    chunk = own_chunk(tensor_of_7(ranks))
    wrong = {0: ((0,), (3,)), 4: ((3,), (4,))}[chunk.offsets[0]]
    checkpoint_module.own_chunk = lambda tensor: ChunkStorageMetadata(*map(torch.Size, wrong))


def _with_a_lost_file(ranks, folder):
    write = checkpoint_module.write_tensors

    def write_and_lose(partial, *about):
        planned = write(partial, *about)
        dist.barrier()
        if ranks.rank == 1:
            next(partial.glob("shard-00002-*")).unlink()
        return planned

    checkpoint_module.write_tensors = write_and_lose


def tensor_of_7(ranks):
    return distribute_tensor(torch.arange(7.0), init_device_mesh("cpu", (ranks.world_size,)), [Shard(0)])


def _save_in_vain(ranks, folder, spoil):
    checkpoints = Checkpoints(folder, ranks, keep=1)
    tensors = {"model.x": tensor_of_7(ranks)}
    checkpoints.save(1, tensors, about(ranks, 1))
    spoil(ranks, folder)
    return error_of(lambda: checkpoints.save(2, tensors, about(ranks, 2)))


@pytest.mark.parametrize("spoil", [_with_a_wrong_plan, _with_a_lost_file])
def test_a_save_that_is_not_whole_is_told_on_all_ranks_and_the_older_one_stays(tmp_path, spoil):
    first, second = run_on_ranks(2, _save_in_vain, tmp_path, spoil)
    assert first == second and "does not hold all of model.x, or some of it twice; the checkpoints that are" in first
    assert names_in(tmp_path) == ["step-00000001"]
    assert whole_tensors(tmp_path / "step-00000001")["model.x"].tolist() == [*range(7)]


PIECES = {
    "halves": (([0], [3]), ([3], [4]), True),
    "one number twice, one not at all": (([0], [4]), ([3], [3]), False),
    "a hole": (([0], [3]), ([4], [3]), False),
    "a corner": (([0, 0], [2, 2]), ([0, 2], [2, 1]), ([2, 0], [1, 3]), True),
    "a corner twice": (([0, 0], [2, 2]), ([1, 1], [2, 2]), ([2, 0], [1, 1]), False),
    "nothing beside all": (([0, 0], [2, 3]), ([2, 0], [0, 3]), True),
    "before the first": (([-5], [5]), ([5], [5]), False),
}


@pytest.mark.parametrize("pieces", PIECES)
def test_pieces_that_cover_a_tensor_exactly_once_are_told_from_others(pieces):
    *chunks, right = PIECES[pieces]
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in chunks]
    size = torch.Size(max(c.offsets[i] + c.sizes[i] for c in chunks) for i in range(len(chunks[0].sizes)))
    assert checkpoint_module._is_whole(TensorStorageMetadata(TensorProperties(), size, chunks)) is right


def _hold(pool, folder, cases):
    """Save, look at and read back all cases that are not refused, of which the dry run says the same."""
    refused = []
    for n in sorted({case.n for case in cases}):
        own = [case for case in cases if case.n == n]
        for case, sentence in zip(own, pool.run(n, _save_all, folder, own)[0], strict=True):
            if sentence is not None:
                assert any(map(sentence.startswith, REFUSED)), f"{case}: {sentence}"
                assert _refused(f"{case.model} --model.vocab-size {case.vocab} {case.layout}", n) == sentence
                refused.append(case)
    saved = [case for case in cases if case not in refused]
    for case in saved:
        found, right = whole_tensors(folder / case.name / "step-00000001"), _expected(case)
        assert found.keys() == right.keys(), case
        assert [name for name in right if not torch.equal(found[name], right[name])] == [], case
    for m in sorted({case.m for case in saved}):
        assert pool.run(m, _read_all, folder, [case for case in saved if case.m == m]) == [[]] * m


@pytest.fixture
def no_corpus(monkeypatch):
    """The dry run does not compare the vocabulary with a corpus, which may be at hand."""
    monkeypatch.setattr(dry_run, "at_hand", lambda: False)


@pytest.mark.parametrize("beginning", REFUSED)
def test_what_is_refused_is_refused_before_step_1_and_by_the_dry_run(no_corpus, beginning):
    _, flags = REFUSED[beginning]
    assert _refused(f"{TINY} --optimizer.balance-loss 0 --model.vocab-size 65 {flags}", 8).startswith(beginning)


def test_at_most_a_tenth_of_the_drawn_layouts_is_refused_and_none_of_the_fixed_ones():
    refused = []
    for case in FIXED + DRAWN:
        options = read_options(shlex.split(f"{case.model} {case.layout}"))
        try:
            resolve_layout(options, model_config(options, case.vocab), case.n)
        except LayoutError:
            refused.append(case)
    assert len(FIXED) == 9 and len(DRAWN) == 225
    assert len(refused) <= 22 and not set(refused) & set(FIXED), refused


def test_9_layouts_save_each_number_once_and_other_ranks_read_it(pool, no_corpus, tmp_path):
    _hold(pool, tmp_path, FIXED)


@pytest.mark.full
@pytest.mark.parametrize("first", range(0, 225, 25))
def test_225_more_layouts_do_or_are_refused_before_step_1(pool, no_corpus, tmp_path, first):
    _hold(pool, tmp_path, DRAWN[first : first + 25])


SIXTEEN = [
    Case(f"16 ranks, tensor {tensor}", 16, f"--parallel.strategy fsdp --parallel.tensor {tensor}", vocab)
    for tensor, vocab in ((4, 35), (2, 65))
]


@pytest.mark.full
def test_16_ranks_lose_nothing_of_a_vocabulary_that_does_not_split(tmp_path):
    """Some of them have no rows at all."""
    assert run_on_ranks(16, _save_all, tmp_path, SIXTEEN)[0] == [None, None]
    for case in SIXTEEN:
        found, right = whole_tensors(tmp_path / case.name / "step-00000001"), _expected(case)
        assert found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)
