"""What lessons 00 to 05 and 11 to 15 say is what their cells compute or have recorded, or what a source says."""

import html
import math
import os
import re
import signal
import subprocess
import sys

import nbformat
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from definitions import taken_from
from manyhands.align.chat import END, LetterTask, encode, with_markers
from manyhands.course.folders import ROOT
from manyhands.launch import recorded_runs
from manyhands.lessons import on_your_cluster
from torch import nn

# sentences that were untrue, as they stood: none comes back, in no lesson and nowhere else
OLD = (
    "One training step of it takes 28 MB",
    "Nine times the model",
    "no rank ever sends more than 80 MB",
    "four copies fail to find out",
    "Four programs that are each alone",
    "gradients that are n times too large",
    "rank 2 has called five",
    "is a workshop's trainer",
    "nobody noticed",
    "and nobody [scales the loss]",
    "from a key of a seed, here 0, and the epoch, read in micro-batches",
    "put both builds together: each global batch",
    "with a warm-up; that of knowing nothing",
    "the linear rule makes the loss worst",
    "The noise scale grows as the loss falls",
    "lets the batch grow with the noise scale",
    "helps up to the noise scale",
    "useful batches grow",
    "with a loss of 10",
    "Do not invent arithmetic with seeds. Put",
    "that NCCL prefers on many nodes",
    "work on a compute node yourself | `qsub -I -l select=1,walltime=00:30:00` | `salloc",
    "What is its exit status",
    "your job's name from now on",
    "with it, a later group of gloo alone",
    "does it stay fast on 512",
    "Does overlap help on 512",
    "the number of calls matters and overlap does not",
    "DDP's default is 25 MiB per bucket.",
    "Forty small messages pay α forty times",
    "**The culprit is missing somewhere and waits nowhere.**",
    "does something else",
    "Under FSDP there is no such hook",
    "failures below are real, on real processes. Each takes seconds",
    "Any number of ranks finds the same copies. (",
    "is between the two. It begins with the 256 bytes",
    "Stale answers keep all ranks busy",
    "second and the third bar comes from the verifier",
    "models learn to write such answers",
    "scoring 88 s",
    '"score"',
    "More ranks do not help",
    "two cumulative sums",
    "A cache takes 2 ·",
    "removes almost all of that traffic",
    "github.com/NVIDIA/nccl-tests): `srun",
)
WHERE = (
    "scripts/[01]*_*.py", "notebooks/*.ipynb", "assets/handbook/*.md", "assets/*.md", "assets/src/*.py",
    "assets/site/*.md", "assets/published/*.json", "assets/*.svg", "README.md",
)  # fmt: skip


def plain(path):
    """The text of a file without a comment's marks and line ends, in notebooks of sources and outputs."""
    text = path.read_text("utf-8")
    if path.suffix == ".ipynb":
        text = text.replace('\\n",', "").replace('\\"', '"')
        text = re.sub(r'^\s*"', "", text, flags=re.M)
    return re.sub(r"\s+", " ", re.sub(r"^ *# ?", "", text, flags=re.M))


def cells(lesson):
    return nbformat.read(ROOT / "notebooks" / f"{lesson}.ipynb", 4).cells


def folded(lesson, question):
    """The answer to a question, as it stands in the closed fold below its blank."""
    outputs = [output for cell in cells(lesson) if cell.cell_type == "code" for output in cell.outputs]
    pages = [output.get("data", {}).get("text/html", "") for output in outputs]
    found = [re.fullmatch(rf"<details><summary>{question}: no guess yet</summary>(.*)</details>", one) for one in pages]
    return next(one[1] for one in found if one)


def stored(lesson, within):
    """The lines that the cells of a lesson whose source has `within` have printed, also into a fold."""
    return [
        line.split(" | ", 1)[-1]
        for cell in cells(lesson) if cell.cell_type == "code" and within in cell.source
        for output in cell.outputs
        for line in (output.get("text") or _told(output.get("data", {}))).splitlines()
    ]  # fmt: skip


def _told(data):
    fold = data.get("text/html", "")
    if fold.startswith("<details>"):
        return html.unescape(re.sub(r"<.*?>", "\n", fold)).strip()
    return data.get("text/plain", "")


# what gives the answer to a question away is told in the fold of the question, and nowhere in the open
GIVEN_AWAY = [
    ("00_start", "different ranks under mpiexec", "rank 0 of 1"),
    ("01_one_device", "peak of the step", "times that"),
    ("01_one_device", "bytes per parameter with bf16 weights", "GB of state"),
    ("02_collectives", "forty small all-reduces against one large", "measured, the library's all-reduce"),
    ("04_first_job", "the rank that failed first", "rank 3 ended with status 1"),
    ("08_pipeline_parallel", "gathers of a block, 1F1B with 8 micro-batches", "freed after each forward"),
    ("09_context_and_experts", "experts' gradients on four ranks, times what they should be", "up 4.0000"),
    ("10_meshes_and_planning", "the order with the fewest bytes between nodes", "pipeline 17.2"),
    ("10_meshes_and_planning", "the order with the least waiting", "54 GB, 231 ms"),
    ("10_meshes_and_planning", "different batches that 2 x 2 x 2 ranks read", "shard 2 x tensor 2"),
    ("11_when_it_breaks", "the rank at fault", "was not made by ranks [2]"),
    ("11_when_it_breaks", "processes that torchrun started", "processes ["),
    ("12_llm_pretraining", "kB of records that a rank of 4 receives", "32,288 bytes of records"),
    (
        "12_llm_pretraining",
        "how many times larger the best model is for ten times the FLOPs",
        "0.60 here, budget^0.46 there",
    ),
    ("15_on_your_cluster", "file-system calls of 256 ranks that import torch", "19,947 calls"),
]


@pytest.mark.parametrize("lesson, question, away", GIVEN_AWAY)
def test_what_gives_an_answer_away_is_told_in_its_fold_alone(lesson, question, away):
    assert away in html.unescape(folded(lesson, re.escape(html.escape(question))))
    outputs = [output for cell in cells(lesson) if cell.cell_type == "code" for output in cell.outputs]
    pages = [re.sub(r"<details>.*?</details>", "", str(output.get("data", "")), flags=re.S) for output in outputs]
    shown = [html.unescape(page) + output.get("text", "") for page, output in zip(pages, outputs, strict=True)]
    assert [one for one in shown if away in one] == []


def test_no_file_has_a_copy_of_a_mended_sentence():
    files = {path: plain(path) for pattern in WHERE for path in sorted(ROOT.glob(pattern))}
    assert len(files) > 150
    found = [(path.name, old) for path, text in files.items() for old in OLD if old in text]
    assert found == []


SOURCES = {  # what is quoted: (the file, its source)
    "43 % fewer": ("scripts/05_same_science.py", "arxiv.org/abs/2505.23971"),
    "43 % fewer gradient steps": ("assets/handbook/05_same_science.md", "arxiv.org/abs/2505.23971"),
    "NCCL has both": ("scripts/05_same_science.py", "github.com/NVIDIA/nccl/issues/754"),
    "does not inherit": ("scripts/04_first_job.py", "slurm.schedmd.com/srun.html"),
    "opens its shell on the login node": ("assets/handbook/04_first_job.md", "OPT_use_interactive_step"),
    "137 or 265": ("assets/handbook/04_first_job.md", "technion.ac.il"),
    "`0:9`": ("assets/handbook/04_first_job.md", "slurm.schedmd.com/sacct.html"),
    "new group of gloo alone may hang": ("scripts/00_start.py", "pytorch/issues/145376"),
    "last changed in April 2024": ("scripts/03_data_parallel.py", "github.com/mosaicml/llm-foundry"),
    "has that entry": ("scripts/01_one_device.py", "alcf-hpc-workshop-2024.md"),
    "a world of one": ("scripts/15_on_your_cluster.py", "nccl-tests/issues/27"),
    "in long trainings wrong answers grew": ("scripts/13_llm_alignment.py", "arxiv.org/abs/2503.20783"),
    "log p of the old policy 88 s": ("assets/handbook/13_llm_alignment.md", "one_step_off.md"),
}


@pytest.mark.parametrize("quoted", SOURCES)
def test_what_is_quoted_stands_beside_its_source(quoted):
    file, source = SOURCES[quoted]
    paragraphs = re.split(r"\n#?\s*\n", (ROOT / file).read_text("utf-8"))
    paragraphs = [re.sub(r"\s+", " ", re.sub(r"^# ?", "", part, flags=re.M)) for part in paragraphs]
    assert any(quoted in part and source in part for part in paragraphs), f"{file}: {quoted!r} without {source}"


# ------------------------------------------------------------------ 00 to 05


def test_with_one_piece_the_wrong_precision_loses_nothing_and_with_4096_almost_every_gradient():
    torch.manual_seed(0)
    start, ids_BT = nn.Sequential(nn.Embedding(65, 32), nn.Linear(32, 65)), torch.randint(65, (12, 64))
    said = []

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Embedding(65, 32), nn.Linear(32, 65))
            self.layers.load_state_dict(start.state_dict())

        def forward(self, x_BT, y_BT):
            logits_BTV = self.layers(x_BT)
            return logits_BTV, nn.functional.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())

    table = {"bf16": torch.float16, "mended": torch.bfloat16}
    around = {"new_model": Model, "batch": lambda step: (ids_BT, ids_BT), "PRECISIONS": table, "say": said.append}
    ours = taken_from("01_one_device", "train", device=torch.device("cpu"), **around)
    share = lambda logits_BTV: (logits_BTV.grad == 0).float().mean().item()  # noqa: E731
    assert share(ours.train("bf16", pieces=1)) < 0.01
    assert share(ours.train("mended", pieces=1)) == 0
    assert share(ours.train("bf16", pieces=4096)) > 0.9
    alone, right, many = (line for line in said if line.startswith("losses"))
    ends = [float(line.split()[-1]) for line in (alone, right, many)]
    assert ends[0] == pytest.approx(ends[1], abs=0.02) and ends[2] > ends[0]


def test_forty_all_reduces_pay_the_latency_240_times_and_one_6_times_and_both_are_measured():
    assert (2 * (4 - 1), 40 * 2 * (4 - 1)) == (6, 240)
    said = stored("02_collectives", "forty small all-reduces")[-1]
    assert re.fullmatch(r"measured, the library's all-reduce on 4 ranks: [\d.]+ times as long \(.* to .*\)", said)


def test_the_first_bucket_of_ddp_is_1_mib_so_that_3_27_mb_travel_in_two():
    assert dist._DEFAULT_FIRST_BUCKET_BYTES == 2**20 < 816_705 * 4 < 25 * 2**20
    assert "library: 2 all-reduces" in stored("03_data_parallel", '"library": DDP(new_model())}.items()')


def test_the_line_for_srun_names_the_cores_as_our_launcher_does():
    ours = recorded_runs.text("04_failed.out").splitlines()[0]
    (line,) = re.findall(r"^# (srun --ntasks-per-node 1 .*)", (ROOT / "scripts/04_first_job.py").read_text(), re.M)
    assert "--cpus-per-task=2" in ours and "--cpus-per-task 2" in line


def test_a_shell_says_137_of_a_killed_program_and_pbs_may_add_256():
    killed = subprocess.run(["bash", "-c", "bash -c 'kill -9 $$'; exit $?"], stderr=subprocess.DEVNULL)
    assert killed.returncode == 137 == 128 + signal.SIGKILL and 256 + signal.SIGKILL == 265
    assert folded("04_first_job", "the exit status after SIGKILL") == "it is 137"


def test_text_and_figure_of_the_token_mean_have_the_same_losses():
    text = (ROOT / "scripts/05_same_science.py").read_text("utf-8")
    (named,) = re.findall(r"with the losses (\d), (\d) and (\d)\. Rank 1 has one, with a loss of (\d)", text)
    losses = [int(loss) for loss in named]
    means = sum(losses[:3]) / 3, losses[3]
    assert f"The mean of the two means, {means[0]:.0f} and {means[1]}, is {sum(means) / 2:.0f}." in text
    drawn = (ROOT / "assets/src/05_same_science.py").read_text("utf-8")
    assert (
        f"mean of means: (2 + 6) / 2 = {sum(means) / 2:.0f}" in drawn
        and f"(6 + 6) / (3 + 1) = {sum(losses) / 4:.0f}" in drawn
    )
    assert folded("05_same_science", "the mean loss of the four tokens") == f"it is {sum(losses) / 4:.0f}"


def test_the_sweep_carries_its_conclusions_a_batch_of_32_never_caught_up_and_had_no_warm_up():
    lines = stored("05_same_science", "batch 32, {name}")
    rows = {line[:30].strip(): line[30:] for line in lines}
    loss = {name: [float(number) for number in re.findall(r"\d\.\d\d", row)] for name, row in rows.items()}
    others = [loss[f"batch 32, {name}"] for name in ("the same", "by the noise scale", "square root")]
    assert all(other[1] > loss["batch 4"][2] for other in others)
    same, by_noise, _ = others
    assert same[1] <= by_noise[0] <= same[2], "not told apart"
    assert rows["batch 32, linear"].endswith(": diverged")
    updates = int(re.search(r"(\d+) with batch 32", lines[-1])[1])
    assert updates == 12_288 // (32 * 32) == 12 and max(1, updates // 10) == 1, "a warm-up of one update is none"
    scales = [
        float(re.search(r"B_noise = ([\d.]+)", line)[1]) for line in stored("05_same_science", "B_noise = {scale")
    ]
    assert scales == sorted(scales) and scales[0] < 4, "small, and it grew"


def test_the_librarys_sampler_draws_epoch_1_of_seed_0_as_epoch_0_of_seed_1():
    from torch.utils.data.distributed import DistributedSampler

    orders = []
    for seed, epoch in ((0, 1), (1, 0), (0, 0)):
        sampler = DistributedSampler(range(40), 2, 0, seed=seed)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    assert orders[0] == orders[1] != orders[2]


# ------------------------------------------------------------------ 11 to 15


def test_the_rule_of_exercise_1_names_nobody_in_the_hang_of_core():
    given = {"checks": None}
    ours = taken_from("11_when_it_breaks", "usual", "calls_in", "missing_call", "where_it_stands", "culprit", **given)
    calls = [[("train", number, "all_reduce", 1000) for number in range(1, 7)] for _ in range(4)]
    calls[2] = [*calls[2][:5], ("valid", 1, "all_reduce", 1)]
    everybody = {"train": [0, 1, 2, 3], "valid": [0, 1, 2, 3]}
    assert ours.culprit(calls, everybody) is None, "rank 2 waits in `valid`"
    calls[2].pop()
    assert ours.culprit(calls, everybody) == (2, "train", 6)


def test_in_a_tie_the_usual_call_is_the_same_in_every_process():
    (usual,) = re.findall(r"^def usual.*?\n(?=\n)", (ROOT / "scripts/11_when_it_breaks.py").read_text(), re.M | re.S)
    program, said = usual + "print(usual(['broadcast', 'all_reduce', 'all_reduce', 'broadcast', None]))", set()
    for salt in range(6):
        environ = os.environ | {"PYTHONHASHSEED": str(salt)}
        said.add(subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True).stdout)
    assert said == {"all_reduce\n"}


def finite_before_the_sum(ranks):
    """On each rank, whether its own gradients were finite in FSDP's reduce-scatter, and those after it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    seen = []

    class Looking(DefaultReduceScatter):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            seen.append(bool(input_tensor.isfinite().all()))
            return super().__call__(output_tensor, input_tensor, group, op, async_op)

    torch.manual_seed(0)
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=dist.init_device_mesh("cpu", (ranks.world_size,)))
    model.set_custom_reduce_scatter(Looking())
    x_BD = torch.full((2, 4), math.nan if ranks.rank == 1 else 1.0)
    model(x_BD).sum().backward()
    return seen, bool(model.weight.grad.to_local().isfinite().all())


def test_fsdps_reduce_scatter_sees_each_ranks_own_gradients(pool):
    assert pool.run(2, finite_before_the_sum) == [([True], False), ([False], False)]


def test_a_shard_in_which_a_byte_has_flipped_loads_without_an_error(tmp_path):
    dcp.save({"w": torch.arange(1000.0)}, checkpoint_id=tmp_path, no_dist=True)
    (shard,) = tmp_path.glob("*.distcp")
    data = bytearray(shard.read_bytes())
    place = data.index(torch.tensor([500.0, 501.0]).numpy().tobytes())
    data[place + 3] ^= 1
    shard.write_bytes(data)
    read = {"w": torch.zeros(1000)}
    dcp.load(read, checkpoint_id=tmp_path, no_dist=True)
    assert (read["w"] != torch.arange(1000.0)).sum() == 1


def copies_found(ranks):
    """What `near_copies` finds on these ranks among 60 documents, every third one a copy of the one before it."""
    given = {"rank": ranks.rank, "world_size": ranks.world_size, "device": torch.device("cpu"), "hashes": 128}
    names = "parcels", "colliding", "similarity", "near_copies", "shingle_hashes", "signature"
    ours = taken_from("12_llm_pretraining", *names, PRIME=2**31 - 1, **given)
    a_K, b_K = np.random.default_rng(0).integers(1, 2**31 - 1, size=(2, 128))
    draw = np.random.default_rng(3)
    texts = [" ".join(map(str, draw.integers(0, 1000, 30))) for _ in range(60)]
    texts = [texts[i - 1] + " end" if i % 3 == 2 else text for i, text in enumerate(texts)]
    mine = texts[ranks.rank :: ranks.world_size]
    mine_eK = np.stack([ours.signature(ours.shingle_hashes(text), a_K, b_K) for text in mine])
    found = [None] * ranks.world_size
    dist.all_gather_object(found, ours.near_copies(mine_eK))
    return sorted((second, first) for part in found for second, first in part.items())


def test_any_number_of_ranks_finds_the_same_copies(pool):
    found = {n: pool.run(n, copies_found) for n in (1, 2, 4)}
    assert found[1][0] == found[2][1] == found[4][3] and len(found[1][0]) >= 18


def test_all_texts_of_lesson_12_are_fewer_bytes_than_all_signatures():
    said = " ".join(stored("12_llm_pretraining", "by the all-gather {gather_kb"))
    assert int(re.search(r"all texts together: (\d+) kB", said)[1]) < int(
        re.search(r"by the all-gather (\d+)", said)[1]
    )


def test_the_parts_of_a_published_step_are_the_whole_step():
    for series in recorded_runs.published("13_one_step_off"):
        step = int(re.search(r"of a step of (\d+) s", series["note"])[1])
        assert len(series["parts"]) == len(series["points"]) and sum(s for _, s in series["points"]) == step
        assert "score" not in series["parts"]


def test_the_figures_of_lesson_13_have_the_ranks_that_draw():
    drawn = (ROOT / "assets/13_grpo.svg").read_text("utf-8")
    assert "rank 2" in drawn and "rank 3" in drawn and "rank 0" not in drawn


def test_every_right_answer_of_lesson_13_has_five_tokens():
    task, vocab = LetterTask("sort", letters=12, length=4), with_markers("abcdefghijklmnopqrstuvwxyz \n,.:'")
    for word in task.draw(20, [7], held_out=True):
        talk = [*task.messages(word), {"role": "assistant", "content": task.answer(word)}]
        ids, written = encode(talk, vocab)
        assert sum(written) == 5 and ids[-1] == vocab.index(END)


def test_a_bandwidth_test_under_srun_is_built_with_mpi():
    for path in [*ROOT.glob("scripts/[01]*.py"), *ROOT.glob("assets/handbook/*.md"), *ROOT.glob("assets/site/*.md")]:
        text = plain(path)
        for found in re.finditer(r"`srun[^`]*all_reduce_perf", text):
            assert "MPI=1" in text[found.start() - 200 : found.end() + 200], path


def test_the_guess_on_one_core_is_judged_by_what_was_measured():
    shared = on_your_cluster.Shared({on_your_cluster.ALL: [1.0, 2.0, 3.0], on_your_cluster.ONE: [2.0, 2.6, 9.0]}, 2, 2)
    assert shared.ratio == 1.3
    assert str(shared).startswith("measured 1.3 times as long, predicted 2: other programs use these cores too")
    said = folded("15_on_your_cluster", "one core instead of all: times as long, measured")
    number = re.match(r"it is ([\d.]+)", said)[1]
    assert f"measured {number} times as long, predicted" in said
