"""Folders as the library transformers writes them: what comes in computes what transformers computes, on any ranks."""

import copy
import gc
import json
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from manyhands.align.options import LoraOptions
from manyhands.checkpoint import export, manifest, to_folder
from manyhands.checkpoint.checkpoints import Checkpoints
from manyhands.checkpoint.export import load_model, tokenizer_of
from manyhands.checkpoint.folders import ModelFolder
from manyhands.checkpoint.manifest import CheckpointError, read_manifest
from manyhands.config.layout import resolve_layout
from manyhands.config.model_folder import ModelFolderError, sizes_in
from manyhands.config.options import (
    OptionError,
    Options,
    ParallelOptions,
    TrainOptions,
    from_file,
    model_config,
    read_options,
)
from manyhands.course.folders import write_whole
from manyhands.data.corpus import Corpus, get_batch, open_text
from manyhands.data.shakespeare import DataError
from manyhands.data.tokenizer import FOREIGN, tokenizer_from, tokenizer_of_folder, train_bpe
from manyhands.gpt.config import GPTConfig
from manyhands.gpt.lora import add_lora
from manyhands.gpt.model import GPT
from manyhands.launch import settings
from manyhands.measure.tensor_bytes import local_part
from manyhands.parallel.fsdp import without_numbers
from manyhands.parallel.strategy import parallelize
from manyhands.serve.client import Client
from manyhands.train import dry_run
from manyhands.train.dry_run import to_toml
from manyhands.train.start import fill, model_folder
from rank_pool import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_serve_program import start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

SCRIPTS = Path(__file__).parents[1] / "scripts"
T, V = 64, 300
WORDS = ["to be, or not to be: that is the question", "whether 'tis nobler in the mind to suffer", "and sorrows. "]
TEXT = [
    f"{a} {b} {c} {n} times over, and then once more " for n in range(9) for a in WORDS for b in WORDS for c in WORDS
]
TURNS = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS = {
    "Llama": {"num_key_value_heads": 2},
    "Llama, tied": {"tie_word_embeddings": True},
    "Llama, wide heads, scaled": {
        "head_dim": 20,
        "rope_parameters": {**TURNS, "rope_theta": 5e5, "original_max_position_embeddings": 16},
    },
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 96},
    "Olmo": {"num_key_value_heads": 2, "clip_qkv": 0.7},
    "Olmo, tied": {"tie_word_embeddings": True},
    "Mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
    "Mixtral, 3 of 5, tied": {
        "num_key_value_heads": 4,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        "tie_word_embeddings": True,
    },
    "GPT2, tied": {},
    "GPT2, exact GELU, tied": {"activation_function": "gelu"},
}

pytestmark = pytest.mark.usefixtures("one_thread")


def theirs(case):
    """A tiny model with weights that matter: at the library's own deviation of 0.02 attention moves nothing."""
    import transformers  # late: it takes seconds

    kind = case.partition(",")[0]
    sizes = dict(vocab_size=V, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4)
    if kind == "GPT2":
        sizes = dict(vocab_size=V, n_embd=48, n_layer=2, n_head=4, n_positions=128)
    ends = dict(initializer_range=0.3, bos_token_id=0, eos_token_id=0)
    ends |= {} if kind == "GPT2" else {"max_position_embeddings": 128}
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **KINDS[case], **ends})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}{'LMHeadModel' if kind == 'GPT2' else 'ForCausalLM'}")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name or "bias" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def change(folder, name="config.json", drop=(), **values):
    path = folder / name
    content = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(content | values))


def add_tokenizer(folder):
    content = train_bpe(TEXT, V).content
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|document|>"}}))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """{case: folder}, written by transformers, each with a tokenizer; and their logits of the same ids."""
    folders, ids_BT = {}, torch.randint(V, (3, T), generator=torch.Generator().manual_seed(4))
    for case in KINDS:
        model, folder = theirs(case), tmp_path_factory.mktemp("made") / "model"
        model.save_pretrained(folder, max_shard_size="60KB" if "tied" in case else "5GB")
        add_tokenizer(folder)
        with torch.no_grad():
            folders[case] = folder, ids_BT, model(ids_BT).logits
    return folders


@pytest.fixture
def llama(made, tmp_path):
    """A copy of a folder that a test may change."""
    return Path(shutil.copytree(made["Llama"][0], tmp_path / "llama"))


@torch.no_grad()
def apart(folder, ids_BT, expected_BTV):
    """The largest difference of logits at any position, over the logits' deviation."""
    return ((load_model(folder)[0](ids_BT)[0] - expected_BTV).abs().max() / expected_BTV.std()).item()


@pytest.mark.parametrize("case", KINDS)
def test_the_logits_are_those_of_transformers_at_every_position(case, made):
    assert apart(*made[case]) <= 1e-5
    shards = len(list(made[case][0].glob("*.safetensors")))
    assert shards > 1 if "tied" in case else shards == 1


@pytest.mark.parametrize("case", ["Llama", "Llama, wide heads, scaled", "Mistral", "Mixtral"])
def test_the_older_dialect_and_both_together_are_read_alike(case, made, tmp_path):
    sizes, folder = sizes_in(made[case][0]), Path(shutil.copytree(made[case][0], tmp_path / "old"))
    turns = json.loads((folder / "config.json").read_text())["rope_parameters"]
    theta = turns.pop("rope_theta")
    scaling = turns | {"type": turns["rope_type"]} if case.endswith("scaled") else None
    change(folder, rope_theta=int(theta), rope_scaling=scaling, torch_dtype="float32")
    assert sizes_in(folder) == sizes
    change(folder, drop=["rope_parameters", "dtype"])
    assert sizes_in(folder) == sizes
    change(folder, hidden_size=48.0)
    assert sizes_in(folder) == sizes and isinstance(sizes_in(folder)["n_embd"], int)


def test_what_is_missing_takes_the_kinds_own_default_and_null_does_not(made, tmp_path):
    defaults = ("Llama", 4, 2048), ("Mistral", 8, 4096), ("Olmo", 4, 2048), ("Mixtral", 8, 131072)
    for case, heads, longest in defaults:
        folder = Path(shutil.copytree(made[case][0], tmp_path / case))
        names = ("num_key_value_heads", "max_position_embeddings", "sliding_window", "rope_parameters", "rms_norm_eps")
        change(folder, drop=names)
        sizes = sizes_in(folder)
        theta, eps = (1e6, 1e-5) if case == "Mixtral" else (1e4, None if case == "Olmo" else 1e-6)
        assert (sizes["n_kv_head"], sizes["block_size"], sizes["rope_theta"]) == (heads, longest, theta)
        assert sizes.get("norm_eps") == eps
        change(folder, num_key_value_heads=None, sliding_window=None, tie_word_embeddings=None, head_dim=None)
        assert sizes_in(folder)["n_kv_head"] == 4 and not sizes_in(folder)["tie"]
        assert sizes_in(folder)["block_size"] == (131072 if case[:2] == "Mi" else 2048)


def test_a_gpt2_is_read_under_its_first_names_and_up_to_a_shorter_block(made, tmp_path):
    source, ids_BT, expected_BTV = made["GPT2, tied"]
    folder = Path(shutil.copytree(source, tmp_path / "gpt2"))
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    for path in folder.glob("model*"):
        path.unlink()
    masks = {"h.0.attn.bias": torch.ones(1, 1, 8, 8), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    first = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    save_file(first | masks, folder / "model.safetensors")
    assert apart(folder, ids_BT, expected_BTV) <= 1e-5
    short = GPTConfig(**sizes_in(folder) | {"block_size": 32})
    assert torch.equal(ModelFolder(folder, short).tensor("positions.weight"), first["wpe.weight"][:32])
    for values, message in (
        ({"n_inner": 100}, "n_inner is 100, and 192 is supported"),
        ({"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True, and False is supported"),
        ({"activation_function": "relu"}, "activation_function is 'relu', and gelu, gelu_new, gelu_pytorch_tanh are"),
    ):
        change(folder, n_inner=None, reorder_and_upcast_attn=False, activation_function="gelu_new")
        change(folder, **values)
        with pytest.raises(ModelFolderError, match=message):
            sizes_in(folder)


def test_a_second_copy_of_a_tied_head_is_dropped_and_another_head_is_refused(made, tmp_path):
    source, *rest = made["Llama, tied"]
    folder = Path(shutil.copytree(source, tmp_path / "tied"))
    tensors = {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}
    for path in folder.glob("model*"):
        path.unlink()
    head = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    assert apart(folder, *rest) <= 1e-5
    head[7, 5] += 1
    save_file(tensors | {"lm_head.weight": head}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tie_word_embeddings is true, and lm_head.weight is not model.embed"):
        load_model(folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_the_same_numbers_in_32(dtype, llama):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors")
    model = load_model(llama)[0]
    assert torch.equal(model.head.weight, tensors["lm_head.weight"].float())


# --- what is refused


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def with_tensors(change):
    def act(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return act


def as_bin(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def index(files):
    def act(folder):
        (folder / "model.safetensors").rename(folder / "a.safetensors")
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    return act


NORM = "model.norm.weight"
REFUSED = {
    "num_experts_per_tok is 1 of 4, and 2 or more": dict(
        architectures=["MixtralForCausalLM"], num_experts_per_tok=1, num_local_experts=4
    ),
    "router_jitter_noise is 0.1, and 0 is supported": dict(router_jitter_noise=0.1),
    "lacks the tensor model.layers.0.block_sparse_moe.gate.weight": dict(
        architectures=["MixtralForCausalLM"], num_local_experts=2
    ),
    "architectures says BertModel, and LlamaForCausalLM, ": dict(architectures=["BertModel"]),
    "its weights are quantised, and fp32, bf16 and fp16 are read": dict(quantization_config={"bits": 4}),
    "auto_map brings code of its own, which nothing here executes": dict(auto_map={"AutoModel": "m.py"}),
    "hidden_act is 'gelu', and 'silu' is supported": dict(hidden_act="gelu"),
    "attention_bias is True, and False is supported": dict(attention_bias=True),
    "scaled by 'yarn', and 'llama3' is supported": dict(rope_parameters={"rope_type": "yarn", "rope_theta": 1.0}),
    "rope_theta is 7, and within rope_parameters 10000.0": dict(rope_theta=7),
    "hidden_size is 48.5, which is no size": dict(hidden_size=48.5),
    "num_hidden_layers is True, which is no size": dict(num_hidden_layers=True),
    "embed_tokens.weight in .* has the shape .300, 48., and config.json makes it .300, 44.": dict(hidden_size=44),
    "too few for 10000000 layers": dict(num_hidden_layers=10_000_000),
    "holds no tensors": cut,
    "weights as .bin alone, which can hold code; load it with transformers and save it again": as_bin,
    "model.safetensors.index.json has no weight_map": index(None),
    "names '../a.safetensors', which is no file of this folder": index({NORM: "../a.safetensors"}),
    "b.safetensors is missing; copy": index({NORM: "b.safetensors"}),
    "says a.safetensors has lm_head.bias, and it has not": index({"lm_head.bias": "a.safetensors"}),
    "lacks the tensor model.norm.weight": with_tensors(lambda tensors: tensors.pop(NORM)),
    "holds the tensor model.norm.bias, which": with_tensors(lambda t: t.update({"model.norm.bias": torch.ones(48)})),
    "model.norm.weight in .* is of I32": with_tensors(lambda t: t.update({NORM: torch.ones(48, dtype=torch.int32)})),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_supported_is_one_sentence(message, llama):
    how = REFUSED[message]
    how(llama) if callable(how) else change(llama, **how)
    with pytest.raises(CheckpointError, match=message) as refused:
        load_model(llama)
    assert "\n" not in str(refused.value) and "Traceback" not in str(refused.value)


def test_a_folder_without_a_configuration_or_a_tokenizer_is_refused(llama):
    (llama / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer.json, so nobody can say what its tokens are"):
        load_model(llama)
    (llama / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match="config.json cannot be used .it holds no object"):
        sizes_in(llama)
    (llama / "config.json").unlink()
    with pytest.raises(ModelFolderError, match="has no config.json; name a folder as transformers writes it"):
        sizes_in(llama)
    with pytest.raises(DataError, match="has no tokenizer.json"):
        tokenizer_of_folder(llama)


# --- its tokenizer


def test_a_foreign_tokenizer_encodes_and_writes_as_the_library_does(made):
    from tokenizers import Tokenizer

    folder = made["Llama"][0]
    own, library = tokenizer_of_folder(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "the question — naïve, 東京, 🙂 and sorrows"
    ids = own.encode(text)
    assert ids.tolist() == library.encode(text, add_special_tokens=False).ids
    write = own.writer()
    assert "".join(map(write, ids.tolist())) + write(None, True) == own.decode(ids) == text
    cut = [*ids.tolist(), *own.encode("東").tolist()[:1]]  # ends within a character
    write = own.writer()
    assert "".join(map(write, cut)) + write(None, True) == own.decode(cut) and own.decode(cut)[-1] == "\ufffd"
    assert own.separator == 0 and 0 not in own.encode("<|document|>"), "a text that spells it has none"


# --- ranks

LAYOUTS = {
    "ddp": (2, ParallelOptions()),
    "zero1": (2, ParallelOptions(strategy="zero1")),
    "fsdp": (4, ParallelOptions(strategy="fsdp")),
    "tensor": (2, ParallelOptions(strategy="tp")),
    "a head of keys on 2 ranks": (4, ParallelOptions(strategy="tp")),
    "fsdp x tensor": (4, ParallelOptions(strategy="fsdp", tensor=2)),
    "fsdp x tensor, GPT2": (4, ParallelOptions(strategy="fsdp", tensor=2)),
    "pipeline": (2, ParallelOptions(strategy="pp")),
    "fsdp x tensor, Mixtral": (4, ParallelOptions(strategy="fsdp", tensor=2)),
    "fsdp, Mixtral": (4, ParallelOptions(strategy="fsdp")),
    "experts over 2 ranks, Mixtral": (2, ParallelOptions(expert=2)),
    "tensor, Mixtral": (2, ParallelOptions(strategy="tp")),
}


def filled(ranks, folder, parallel, ids_BT):
    config = GPTConfig(**sizes_in(folder))
    options = Options(train=TrainOptions(global_batch=4), parallel=parallel)
    spread = parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks, without_numbers)
    num_bytes = ModelFolder(folder, config).fill(spread.named_parameters())
    return spread.named_full_parameters(), spread.logits(ids_BT), num_bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_fills_what_it_holds_and_together_they_hold_the_bits_of_the_file(layout, made, pool):
    tied = layout in ("fsdp", "fsdp x tensor", "tensor")
    case = (
        "GPT2, tied" if "GPT2" in layout else "Mixtral" if "Mixtral" in layout else "Llama, tied" if tied else "Llama"
    )
    folder, ids_BT, expected_BTV = made[case]
    n_ranks, parallel = LAYOUTS[layout]
    results = pool.run(n_ranks, filled, folder, parallel, ids_BT)
    whole = dict(load_model(folder)[0].named_parameters())
    total = sum(p.nbytes for p in whole.values())
    for weights, logits_BTV, num_bytes in results:
        assert weights.keys() == whole.keys()
        assert all(torch.equal(weights[name], whole[name]) for name in whole)
        assert (logits_BTV - expected_BTV).abs().max() <= 1e-5 * expected_BTV.std()
        assert num_bytes == total if layout in ("ddp", "zero1") else num_bytes < 0.8 * total
    if "Mixtral" in layout:
        assert sum(num_bytes for _, _, num_bytes in results) < 1.7 * total, "a rank reads of experts what it holds"


def anonymous_bytes():
    """Memory of this process that no file stands for, by /proc."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


@contextmanager
def peak_bytes():
    """A list that holds, afterwards, by how much the memory had grown at most."""
    gc.collect()
    before, seen, peak, done = anonymous_bytes(), [], [], threading.Event()

    def look():
        while not done.wait(0.001):
            seen.append(anonymous_bytes())

    watch = threading.Thread(target=look)
    watch.start()
    yield peak
    done.set()
    watch.join()
    peak.append(max(seen) - before)


def peak_while_filling(ranks, folder, parallel):
    config = GPTConfig(**sizes_in(folder) | {"block_size": 64})
    options = Options(train=TrainOptions(global_batch=4), parallel=parallel)
    layout = resolve_layout(options, config, ranks.world_size)
    parallelize(GPTConfig(V), resolve_layout(options, GPTConfig(V), ranks.world_size), options, ranks)  # warms up
    with peak_bytes() as peak:
        spread = parallelize(config, layout, options, ranks, without_numbers)
        ModelFolder(folder, config).fill(spread.named_parameters())
    own = sum(local_part(p).nbytes for p in spread.named_parameters().values())
    return peak[0], own


@pytest.mark.full
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name not in ("ddp", "zero1") and "," not in name])
def test_no_rank_ever_has_more_than_its_share_and_one_tensor(layout, tmp_path):
    import transformers

    sizes = dict(vocab_size=16384, hidden_size=512, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=8)
    tied = "pipeline" not in layout
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, tie_word_embeddings=tied)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "large")
    n_ranks, parallel = LAYOUTS[layout]
    whole = 4 * GPTConfig(**sizes_in(tmp_path / "large")).num_params()
    for peak, own in run_on_ranks(n_ranks, peak_while_filling, tmp_path / "large", parallel):
        assert peak < own + 4 * 16384 * 512 + 8 * 2**20 < 1.2 * whole
        assert peak > 0.8 * own, "it is measured"


def filled_by_the_trainer(ranks, folder, strategy):
    config = GPTConfig(**sizes_in(folder))
    options = Options(train=TrainOptions(global_batch=4), parallel=ParallelOptions(strategy=strategy))
    spread = parallelize(config, resolve_layout(options, config, ranks.world_size), options, ranks, without_numbers)
    notes = []
    report = SimpleNamespace(note=notes.append)
    try:
        fill(SimpleNamespace(ranks=ranks, parallel=spread, report=report), ModelFolder(folder, config))
    except CheckpointError as error:
        return str(error)
    return notes


def test_numbers_that_are_none_are_named_by_whoever_reads_them_and_all_ranks_refuse(llama, pool):
    assert pool.run(2, filled_by_the_trainer, llama, "pp")[1][0] == f"reading the model in {llama}"
    name = "model.layers.1.mlp.up_proj.weight"  # of the last stage
    with_tensors(lambda tensors: tensors[name].view(-1)[-1:].fill_(float("nan")))(llama)
    sentence = f"{name} in {llama} holds NaN or infinity; use another copy"
    assert pool.run(2, filled_by_the_trainer, llama, "pp") == [sentence] * 2
    with pytest.raises(CheckpointError, match="holds NaN or infinity"):
        load_model(llama)


# --- the server


@pytest.mark.ranks
def test_a_served_folder_answers_as_transformers_does(made, tmp_path):
    import transformers

    folder = made["Mixtral"][0]
    (tmp_path / "text").write_text(TEXT[0] * 9)
    process, place = start(SCRIPTS.parent, (folder, tmp_path / "text"), tmp_path, "--port", "0")
    try:
        said = Client.from_file(place).complete("to be, or not", max_tokens=12, temperature=0)
    finally:
        process.terminate()
        assert process.wait(60) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer("to be, or not", return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert said == tokenizer.decode(new) and len(new) == 12


@pytest.mark.ranks
def test_a_folder_writes_in_16_bits_as_its_weights_in_16_bits_do(made):
    folder = made["Llama"][0]
    words = [folder, "--dtype", "bf16", "--temperature", "0", "--length", "20", "--prompt", "to be", "--device", "cpu"]
    command = [sys.executable, SCRIPTS / "sample.py", *words]
    ran = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=100)
    assert ran.returncode == 0, ran.stderr
    tokenizer, (model, _) = tokenizer_of_folder(folder), load_model(folder)
    ids_1T = tokenizer.encode("to be")[None]
    low, high = (one.generate(ids_1T, 20, temperature=0)[0] for one in (copy.deepcopy(model).bfloat16(), model))
    assert not torch.equal(low, high), "this model shows the difference"
    text = "".join(c if c in "\n\t" or c.isprintable() else repr(c)[1:-1] for c in tokenizer.decode(low))
    assert ran.stdout == f"{text}\n"


# --- the trainer


def prepared(folder, tmp_path):
    (tmp_path / "text.txt").write_text("\n\n\n\n".join(TEXT))
    words = [tmp_path / "text.txt", "--to", tmp_path / "text", "--tokenizer", folder, "--near", "2"]
    subprocess.run([sys.executable, SCRIPTS / "prepare_data.py", *words], check=True, capture_output=True, timeout=120)
    return tmp_path / "text"


def train(folder, text, tmp_path, *words, nproc=1, steps=2):
    flags = ["--from", folder, "--data.folder", text, "--model.block-size", "32", "--train.global-batch", "4"]
    flags += [
        "--train.steps",
        str(steps),
        "--log.eval-batches",
        "1",
        "--log.sample",
        "3",
        "--log.no-plots",
        "--data.no-mask-documents",
    ]
    flags += ["--checkpoint.folder", tmp_path / "kept", *words]
    launch = [SCRIPTS / "launch.py", "--nproc", str(nproc), "--"] if nproc > 1 else [SCRIPTS / "train.py"]
    env = {**settings.environment(), "MANYHANDS_OUTPUTS": str(tmp_path / "outputs")}
    return subprocess.run(
        list(map(str, [sys.executable, *launch, *flags])), env=env, capture_output=True, text=True, timeout=200
    )


@pytest.mark.full
def test_a_run_goes_on_from_a_folder_and_later_from_its_checkpoint_without_it(llama, tmp_path):
    text = prepared(llama, tmp_path)
    (llama / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    (llama / "chat_template.jinja").write_text(LATER)
    began = train(llama, text, tmp_path, "--parallel.strategy", "fsdp", nproc=2)
    assert began.returncode == 0, began.stderr
    about = read_manifest(tmp_path / "kept" / "step-00000002").metadata
    assert about["base"] == {"name": "llama", "licence": "apache-2.0"} and about["config"]["n_kv_head"] == 2
    x_BT, y_BT = get_batch(open_text(text).val_ids, 0, 4, 32, 0, 1, seed=1)  # what the trainer validates on
    with torch.no_grad():
        expected = load_model(llama)[0](x_BT, y_BT)[1].item()
    losses = json.loads((tmp_path / "outputs" / "train" / "latest" / "metrics.json").read_text())["exact"]["val_losses"]
    assert losses["0"] == pytest.approx(expected, abs=1e-4), "validation of the model as it came"
    shutil.rmtree(llama)
    resumed = train(llama, text, tmp_path, steps=4)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumed from" in resumed.stdout
    later = read_manifest(tmp_path / "kept" / "step-00000004").metadata
    assert later["base"] == about["base"]
    assert later["corpus"]["vocabulary"] == about["corpus"]["vocabulary"]
    assert tokenizer_of(later).template == LATER, "which the text did not say"


def test_a_trained_model_gets_a_small_learning_rate_and_a_short_warm_up(llama, made, tmp_path):
    mixtral = made["Mixtral"][0]
    options = read_options(["--from", str(llama)])
    assert (options.optimizer.lr, options.optimizer.warmup) == (2e-5, 9)
    assert options.model.block_size == 128 and options.model.vocab_size == V
    change(llama, max_position_embeddings=8192)
    options = read_options(["--from", str(llama), "--train.steps", "1000", "--optimizer.lr", "1e-4"])
    assert (options.model.block_size, options.optimizer.lr, options.optimizer.warmup) == (2048, 1e-4, 30)
    assert options.optimizer.balance_speed > 0 == read_options(["--from", str(mixtral)]).optimizer.balance_speed
    (tmp_path / "run.toml").write_text(to_toml(options))
    assert from_file(tmp_path / "run.toml").model == options.model
    assert read_options(["--config", str(tmp_path / "run.toml"), "--from", str(llama)]).optimizer.lr == 1e-4


def test_a_dry_run_says_what_a_fine_tuned_model_takes(llama, monkeypatch):
    monkeypatch.setattr(dry_run, "at_hand", lambda: False)
    said = "takes 16 bytes a parameter in all, in fp32 and under autocast"
    of_folder = dry_run.describe(read_options(["--from", str(llama)]), 1)
    assert said in of_folder and "with LoRA alone (align.py, --lora.rank 8) a rank keeps " in of_folder
    assert "LoRA" not in dry_run.describe(read_options(["--from", str(llama), "--parallel.tensor", "2"]), 2)
    assert said not in dry_run.describe(read_options(["--from", str(llama), "--optimizer.name", "sgd"]), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.n-layer", "3"], "model.n_layer=3, and the model in .* has 2; leave it out"),
        (["--model.block-size", "129"], "model.block_size=129 is more than the model in .* reads, 128; use at most"),
        ([], "the text is cut by another tokenizer than that of .*; cut it anew: scripts/prepare_data.py"),
    ],
)
def test_other_sizes_and_another_tokenizer_are_refused(words, message, llama):
    options, corpus = read_options(["--from", str(llama), *words]), Corpus.from_text("test", TEXT[0])
    with pytest.raises(OptionError, match=message):
        model_folder(options, model_config(options, len(corpus.vocab)), corpus)


LATER = "{% for m in messages %}{{ m.content + '<|document|>' }}{% endfor %}"


def older(folder):
    """What was kept of the folder's tokenizer before it had templates."""
    return {"format": FOREIGN, "tokenizer": json.loads((folder / "tokenizer.json").read_text()), "separator": 0}


def test_a_text_that_the_same_tokenizer_has_cut_is_taken_whatever_template_the_folder_has(llama):
    (llama / "chat_template.jinja").write_text(LATER)
    assert tokenizer_of_folder(llama).ends, "which the older text does not say"
    options, content = read_options(["--from", str(llama)]), older(llama)
    corpus = replace(Corpus.from_text("test", TEXT[0]), tokenizer=tokenizer_from(content))
    assert model_folder(options, model_config(options, V), corpus).path == llama
    for other in (content | {"separator": 1}, content | {"tokenizer": train_bpe(TEXT, V - 1).content}):
        with pytest.raises(OptionError, match="cut by another tokenizer"):
            model_folder(options, model_config(options, V), replace(corpus, tokenizer=tokenizer_from(other)))


# --- out


def saved_by_a_run(folder, config, text, **more):
    """Weights and metadata as `load_model` returns them: a model with weights that matter."""
    torch.manual_seed(5)
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8) if parameter.ndim > 1 else parameter.uniform_(0.5, 1.5)
    corpus = {"name": "test", **text}
    metadata = {"config": asdict(config), "corpus": corpus, "step": 7, "val_loss": 2.5, **more}
    export.write_export(export.weights_of(model), metadata, folder / "model.safetensors")
    return folder / "model.safetensors"


CHARACTERS = sorted(set("".join(TEXT)) | set("\n\té🙂"))
TEXTS = {
    "characters": {"alphabet": CHARACTERS},
    "documents": {"vocabulary": {"format": "manyhands characters 1", "symbols": ["<|document|>", *CHARACTERS]}},
    "bpe": {"vocabulary": train_bpe(TEXT, V).content},
}
OUT = GPTConfig(V, T, 2, 4, 48, style="llama", n_kv_head=2, n_hidden=80)
MODELS = {
    "Llama": OUT,
    "tied, wide heads, scaled": replace(OUT, tie=True, head_dim=20, rope_factor=8.0, rope_original=16, norm_eps=1e-3),
    "GPT-2": GPTConfig(V, T, 2, 4, 48, tie=True, qkv_bias=True),
    "GPT-2, tanh, without biases": GPTConfig(V, T, 2, 4, 48, tie=True, gelu="tanh"),
    "OLMo": replace(OUT, norm="layer", clip_qkv=0.7, rope_theta=5e5),
    "Mixtral": replace(OUT, experts=4, top_k=2),
    "Mixtral, 3 of 5, tied": replace(OUT, experts=5, top_k=3, tie=True),
}


@pytest.mark.parametrize("case", MODELS)
def test_transformers_loads_what_is_written_and_computes_and_writes_the_same(case, tmp_path, capsys):
    import transformers

    source, target = saved_by_a_run(tmp_path, MODELS[case], TEXTS["bpe"]), tmp_path / "out"
    assert export.main([str(source), str(target)]) == 0
    assert f"{target}: {MODELS[case].num_params():,} parameters of step 7" in capsys.readouterr().out
    ours, model = load_model(source)[0], transformers.AutoModelForCausalLM.from_pretrained(target)
    ids_BT = torch.randint(V, (3, T), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected_BTV = model(ids_BT).logits
        assert (ours(ids_BT)[0] - expected_BTV).abs().max() <= 1e-5 * expected_BTV.std()
        prompt_1T = ids_BT[:1, :8]
        written_1T = ours.generate(prompt_1T, T - 8, temperature=0)
        logits_TV = model(written_1T).logits[0]
    first, second = logits_TV.topk(2).values.unbind(-1)
    near = (first - second < 1e-4 * logits_TV.std()).nonzero().flatten().tolist() or [T]
    end = max(8, near[0])
    theirs_1T = model.generate(prompt_1T, max_new_tokens=T - 8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert torch.equal(written_1T[:, :end], theirs_1T[:, :end]) and end > 20
    old = json.loads((target / "config.json").read_text())
    assert old["dtype"] == old["torch_dtype"] == "float32"
    if case[:3] != "GPT":
        assert old["rope_theta"] == old["rope_parameters"]["rope_theta"]


@pytest.mark.parametrize("case", TEXTS)
def test_its_tokenizer_encodes_as_ours_and_comes_in_as_ours(case, tmp_path):
    import transformers

    source, target = saved_by_a_run(tmp_path, OUT, TEXTS[case]), tmp_path / "out"
    export.main([str(source), str(target)])
    theirs, ours = transformers.AutoTokenizer.from_pretrained(target), tokenizer_of_folder(target)
    text = TEXT[5] + "\n\té 🙂 "
    assert theirs(text)["input_ids"] == ours.encode(text).tolist()
    assert theirs.decode(theirs(text)["input_ids"]) == text
    assert theirs.eos_token_id == theirs.bos_token_id == ours.separator == (None if case == "characters" else 0)
    if case != "bpe":
        with pytest.raises(Exception, match="WordLevel error: Missing|unk"):
            theirs("ß")
    corpus = load_model(source)[1]["corpus"]
    assert ours.content == (export.tokenizer_of({"corpus": corpus}).content)


def test_an_older_checkpoint_with_another_tokenizer_goes_out_and_its_separator_ends_a_text(llama, tmp_path):
    source, target = saved_by_a_run(tmp_path, OUT, {"vocabulary": older(llama)}), tmp_path / "out"
    assert export.main([str(source), str(target)]) == 0
    assert json.loads((target / "generation_config.json").read_text()) == {"bos_token_id": 0, "eos_token_id": 0}
    again = tokenizer_of_folder(target)
    assert (again.separator, again.ends, again.encode("to be").tolist()) == (
        0, [0], tokenizer_of_folder(llama).encode("to be").tolist()
    )  # fmt: skip


@pytest.mark.parametrize("case", ["Llama", "Llama, tied", "Olmo", "GPT2, tied", "Mixtral"])
def test_what_comes_in_goes_out_with_its_names_shapes_and_bits(case, made, tmp_path, monkeypatch):
    folder = made[case][0]
    monkeypatch.setattr("manyhands.checkpoint.to_folder.SHARD_BYTES", 60_000)
    export.main([str(folder), str(tmp_path / "out")])
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1

    def all_of(folder):
        return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}

    before, after = all_of(folder), all_of(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    said = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert said.keys() == after.keys(), "an index names what is there, and nothing else"
    assert apart(tmp_path / "out", *made[case][1:]) <= 1e-5
    export.main([str(folder), str(tmp_path / "half"), "--dtype", "bf16"])
    half = all_of(tmp_path / "half")
    assert all(torch.equal(half[name], before[name].bfloat16()) for name in before)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_come_in_and_go_out_as_the_same_numbers_in_32_without_a_tied_heads_second_copy(dtype, llama, tmp_path):
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(llama / "model.safetensors").items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, llama / "model.safetensors")
    change(llama, tie_word_embeddings=True)
    export.main([str(llama), str(tmp_path / "out")])
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors.keys() - out.keys() == {"lm_head.weight"} and not out.keys() - tensors.keys()
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, tensors[n].float()) for n, tensor in out.items())
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}, "some libraries ask for it"


LARGE = replace(OUT, vocab_size=8192, n_layer=8, n_head=8, n_embd=512, n_hidden=1536)


def save_checkpoint(ranks, folder):
    model = GPT(LARGE)
    adapters = LoraOptions(rank=2, alpha=4.0)
    add_lora(model, adapters.rank, adapters.alpha, seed=1)
    mesh = init_device_mesh("cpu", (ranks.world_size,))
    for name, parameter in model.named_parameters():
        if name.endswith(".lora_b"):
            torch.nn.init.constant_(parameter, 0.1)
    tensors = {f"model.{name}": distribute_tensor(p.detach(), mesh, [Shard(0)]) for name, p in model.named_parameters()}
    corpus = {"name": "test", "sha256": "0" * 64, **TEXTS["bpe"]}
    about = {"config": asdict(LARGE), "corpus": corpus, "step": 3, "layout": "shard 2", "world_size": 2}
    checkpoints = Checkpoints(folder, ranks)
    checkpoints.save(3, tensors, about | {"lora": asdict(adapters)})
    checkpoints.close()


def test_an_export_holds_a_tensor_at_a_time_and_folds_adapters(tmp_path, pool, monkeypatch):
    pool.run(2, save_checkpoint, tmp_path / "kept")
    monkeypatch.setattr("manyhands.checkpoint.to_folder.SHARD_BYTES", 20 * 10**6)
    monkeypatch.chdir(tmp_path)
    peaks = []
    for folder in ("first", "second", "out"):  # the first warms up, and a heap in pieces may grow for other reasons
        with peak_bytes() as peak:
            export.main(["kept", folder])  # as people type them
        peaks += peak
    largest = 4 * LARGE.vocab_size * LARGE.n_embd
    assert min(peaks) < 3 * largest + 16 * 2**20 < 0.6 * 4 * LARGE.num_params()
    assert all(path.stat().st_size < 21 * 10**6 for path in (tmp_path / "out").glob("*.safetensors"))
    ours, out = load_model(tmp_path / "kept")[0].state_dict(), load_model(tmp_path / "out")[0].state_dict()
    assert ours.keys() == out.keys() and all(torch.equal(ours[name], out[name]) for name in ours)


def test_a_number_that_is_none_is_named_before_a_folder_is_written(tmp_path):
    source = saved_by_a_run(tmp_path, OUT, TEXTS["bpe"])
    weights, metadata = export.read_export(source)
    weights["blocks.1.mlp.up.weight"][3, 4] = float("nan")
    save_file(weights, source)
    about = json.loads(source.with_suffix(".json").read_text()) | {"file": manifest.describe_file(source).model_dump()}
    del about["sha256"]
    write_whole(source.with_suffix(".json"), manifest.Export.signed(**about).content())
    with pytest.raises(CheckpointError, match="blocks.1.mlp.up.weight of step 7 in .* holds NaN or infinity; use"):
        export.main([str(source), str(tmp_path / "new")])
    assert not list(tmp_path.glob("new*"))


def test_a_card_says_where_the_model_comes_from(tmp_path):
    base = {"name": "SmolLM2-135M", "licence": "apache-2.0"}
    options = {"train": {"steps": 7}, "optimizer": {"lr": 2e-5}}
    source = saved_by_a_run(tmp_path, OUT, TEXTS["bpe"], base=base, options=options)
    export.main([str(source), str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0\n" in card and "after step 7, validation loss 2.5000." in card
    assert "It began from `SmolLM2-135M` (licence: apache-2.0)." in card and '"lr": 2e-05' in card


def without_cutting(tokenizer, right=to_folder.their_tokenizer):
    content, about = right(tokenizer)
    return content | {"pre_tokenizer": None}, about


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTConfig(V, experts=4), "a GPT-2 has no experts, and this model has 4; train with style=llama"),
        (GPTConfig(V), "a GPT-2 has no bias in its head, and this model has one; train with --model.tie"),
        (replace(OUT, norm="layer", experts=4), "an OLMo has no experts, and this model has 4; train with norm=rms"),
        (replace(OUT, norm="layer", head_dim=20), "an OLMo has no head_dim; leave it out"),
        (replace(OUT, clip_qkv=0.7), "a Llama has no clip_qkv=0.7; train with norm=layer"),
        (replace(OUT, experts=4, router="sigmoid"), "router is a softmax; train with --model.router softmax"),
        (replace(OUT, experts=4, top_k=1), "with top_k=1 multiplies by 1, and ours by the probability; use 2"),
    ],
)
def test_a_model_that_transformers_has_no_kind_for_is_refused_with_the_cure(config, message, tmp_path):
    source = saved_by_a_run(tmp_path, config, TEXTS["bpe"])
    with pytest.raises(CheckpointError, match=message):
        export.main([str(source), str(tmp_path / "new")])


def test_biases_that_experts_are_chosen_by_are_refused_and_a_longer_context_goes_out(tmp_path):
    source = saved_by_a_run(tmp_path, replace(OUT, experts=4, max_positions=96), TEXTS["bpe"])
    export.main([str(source), str(tmp_path / "out")])
    assert sizes_in(tmp_path / "out")["block_size"] == 96
    weights, metadata = export.read_export(source)
    weights["blocks.1.mlp.bias"][2] = 1e-3
    export.write_export(weights, metadata, source)
    with pytest.raises(CheckpointError, match="blocks.1.mlp.bias: .* train with --optimizer.balance-speed 0"):
        export.main([str(source), str(tmp_path / "new")])


def test_what_the_format_cannot_hold_and_a_folder_in_use_are_refused_and_nothing_is_left(tmp_path, monkeypatch):
    source, target = saved_by_a_run(tmp_path, OUT, TEXTS["bpe"]), tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="out holds something already; name a new folder"):
        export.main([str(source), str(target)])
    for words, message in (
        (
            [str(tmp_path / "new"), "--half"],
            "--half is for a .safetensors file, and .*new is a folder; use --dtype bf16",
        ),
        (
            [str(tmp_path / "m.safetensors"), "--dtype", "bf16"],
            "--dtype is for a folder, and .*m.safetensors is a file",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            export.main([str(source), *words])
    source = saved_by_a_run(tmp_path, OUT, TEXTS["characters"])
    with monkeypatch.context() as patch:
        patch.setattr("manyhands.checkpoint.to_folder.their_tokenizer", without_cutting)
        with pytest.raises(CheckpointError, match="the tokenizer is not as it was when it is read back; use another"):
            export.main([str(source), str(tmp_path / "new")])
    monkeypatch.setattr(ModelFolder, "tensor", lambda self, name: torch.zeros(1))
    with pytest.raises(CheckpointError, match="is not as it was when it is read back; name another disk"):
        export.main([str(source), str(tmp_path / "new")])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors", "out"]
