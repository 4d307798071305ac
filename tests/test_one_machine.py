"""One model of a machine: what the course says of links between nodes is what the planner's `Group` computes."""

import re
from dataclasses import replace

import pytest
import torch
from definitions import taken_from
from manyhands.course.folders import ROOT
from manyhands.course.lessons import Lesson
from manyhands.measure.virtual_network import Link, VirtualNetwork
from manyhands.predict.machines import Group, machine_named
from manyhands.predict.published_runs import RUNS

H100, A100 = machine_named("h100"), machine_named("a100-80")
FLOPS = 400e12  # of a GPU in lessons 06 and 07


def group(ranks, stride=1, machine=H100):
    """A group that attains the stated bandwidth of its links, as the lessons count."""
    return Group(machine, ranks, stride, link_share=1.0)


def speed(*of, **named):
    """GB/s of a group's ring."""
    return group(*of, **named).bytes_per_s / 1e9


def hides(ranks, times=1.0):
    """Tokens per GPU behind which FSDP's messages over that many ranks hide: in forward, or `times` that."""
    return times * FLOPS / group(ranks).bytes_per_s


def tensor_s(stride):
    """Seconds of lesson 10's tensor messages: in 8 micro-batches and 16 layers four all-reduces, but no latency."""
    stream = 2 * 8 * 2048 * 4096
    return group(4, stride).seconds("all_reduce", 8 * 16 * 4 * stream)


def tokens_of_llama():
    run = next(run for run in RUNS if run.name == "Llama 3 405B, 16384 GPUs")
    return run.positions * run.global_batch / run.gpus


# {file: {a number beside "node": what Group makes of it, or in words why that is not its business}}
SAID = {
    "scripts/00_start.py": {"four times": "a line that each rank prints"},
    "scripts/02_collectives.py": {
        "150 GB/s": "one link of an NVLink board; here a rank sends one message at a time",
        "400 Gb/s": lambda: 8 * speed(2, stride=8),
        "50 GB/s": lambda: speed(2, stride=8),
        "ten times": "a question: a network that gets slower",
    },
    "scripts/05_same_science.py": {"2.7 times": "of a published table"},
    "scripts/06_zero_fsdp.py": {
        "50 GB/s": lambda: speed(64, stride=8),
        "1,500 tokens per GPU": lambda: hides(64, 1.5),
        "1,024 tokens per GPU": tokens_of_llama,
        "1.5 times": lambda: hides(64, 1.5) / hides(64),
    },
    "scripts/07_tensor_parallel.py": {
        "6.2 ms": "one GPU alone, which sends nothing",
        "450 GB/s": lambda: speed(4),
        "50 GB/s": lambda: speed(4, stride=8),
        "four times": "the all-reduces of a layer",
    },
    "scripts/10_meshes_and_planning.py": {
        "one second": lambda: tensor_s(4),
        "400 Gb/s": lambda: 8 * speed(2, stride=8),
        "50 GB/s": lambda: speed(2, stride=8),
        "100 GB/s": lambda: speed(4, stride=4),
        "450 GB/s": lambda: speed(4),
        "4.5 times": lambda: tensor_s(4) / tensor_s(1),
        "four times": "the all-reduces of a layer",
        "4 times": "2/G of the bytes against (G-1)/G of them, on G = 8 ranks of one node",
        "three times": "bytes, which test_meshes_and_planning.py counts",
    },
    "scripts/15_on_your_cluster.py": {"three times": "a question"},
    "assets/handbook/06_zero_fsdp.md": {
        "50 GB/s": lambda: speed(64, stride=8),
        "1,000 tokens per GPU": lambda: hides(64),
        "1,500 tokens per GPU": lambda: hides(64, 1.5),
        "450 GB/s": lambda: speed(8),
        "890 tokens per GPU": lambda: hides(8),
    },
    "assets/handbook/07_tensor_parallel.md": {
        "300 GB/s": lambda: speed(8, machine=A100),
        "25 GB/s": lambda: speed(4, stride=8, machine=A100),
        "450 GB/s": lambda: speed(8),
        "50 GB/s": lambda: speed(4, stride=8),
    },
    "assets/handbook/15_on_your_cluster.md": {"1.1 GB/s": "measured, of an issue"},
}
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
NUMBER = rf"\d[\d.,]*\d|\d|{'|'.join(WORDS)}"
CLAIM = re.compile(rf"\b({NUMBER})[ -](GB/s|TB/s|tokens per GPU|ms|seconds?|times)(?!\w)", re.IGNORECASE)
FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("scripts/[01]*.py", "assets/handbook/*.md", "assets/glossary.md", "assets/src/*.py", "README.md")
    for path in ROOT.glob(pattern)
    if not Lesson(path.stem, ROOT).own
)


def claims(text):
    """Find a file's numbers with such a unit, in paragraphs that name nodes; of tokens per GPU anywhere."""
    text = re.sub(r"(?m)^# ?", "", text)  # a script's prose is a comment
    found = []
    for paragraph in re.split(r"\n\s*\n|\n(?=[|*-] )", text):
        words = " ".join(paragraph.split())
        beside_node = re.search(r"\bnodes?\b", words, re.IGNORECASE)
        found += [m[0].lower() for m in CLAIM.finditer(words) if beside_node or m[2].lower() == "tokens per gpu"]
    return found


def faults(file, text):
    """Sentences on claims of `text` that are in no row of the table, and on rows that are not in the text."""
    rows, found = SAID.get(file, {}), claims(text)
    known = {said.lower() for said in rows}
    told = [f"{file} says {said!r} beside a node: compute it from Group here, or say why not" for said in found]
    return [line for line, said in zip(told, found, strict=True) if said not in known] + [
        f"{file} no longer says {said!r}" for said in rows if said.lower() not in found
    ]


@pytest.mark.parametrize("file", FILES)
def test_each_number_beside_a_node_is_in_the_table(file):
    assert faults(file, (ROOT / file).read_text("utf-8")) == []


ROWS = [(file, said, value) for file, rows in SAID.items() for said, value in rows.items() if callable(value)]


@pytest.mark.parametrize(("file", "said", "value"), ROWS, ids=[f"{file}: {said}" for file, said, _ in ROWS])
def test_each_number_is_the_planners_to_a_percent(file, said, value):
    number = said.split()[0].replace(",", "")
    number = WORDS.index(number) if number in WORDS else float(number)
    # a word is a round number: one second is 1.03
    assert value() == pytest.approx(number, rel=0.05 if said.split()[0] in WORDS else 0.01)


PLANTED = {
    "A gather needs 8,000 tokens per GPU.": "'8,000 tokens per gpu'",
    "Between nodes\n# a GPU sends 75 GB/s.": "'75 gb/s'",
    "It waits two seconds on two nodes.": "'two seconds'",
    'card("On two nodes the layer takes 3.68 ms.")': "'3.68 ms'",
    "It is nine times\nslower between nodes.": "'nine times'",
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_number_is_found(planted):
    file = "scripts/06_zero_fsdp.py"
    told = faults(file, (ROOT / file).read_text("utf-8") + f"\n\n# {planted}\n")
    assert len(told) == 1 and PLANTED[planted] in told[0]


# ------------------------------------------------------------------ what the lessons compute


def lesson_7(ranks):
    """{ranks of the group on each node: virtual seconds of lesson 7's layer}, with the lesson's own constants."""
    lesson = taken_from("07_tensor_parallel", "layer_on", **constants_of_lesson_7(ranks))
    return {per_node: lesson.layer_on(per_node)[0] for per_node in (4, 2, 1)}


def constants_of_lesson_7(ranks):
    text = (ROOT / "scripts/07_tensor_parallel.py").read_text("utf-8")
    given = {"torch": torch, "Link": Link, "ranks": ranks, "group": None, "t": 4}
    exec(text[text.index("INSIDE, BETWEEN =") : text.index("def new_model")], given)  # noqa: S102
    return {name: given[name] for name in ("ranks", "group", "t", "INSIDE", "BETWEEN", "stream", "layer_s", "PARTS")}


def test_lesson_7s_layer_takes_as_long_as_the_planner_says(pool):
    found = pool.run(4, lesson_7)
    for per_node, seconds in found[0].items():
        stream = 2 * 2048 * 4096
        nodes = group(4, machine=replace(H100, gpus_per_node=per_node))
        planned = 72 * 2048 * 4096**2 / FLOPS / 4 + nodes.seconds("all_reduce", 4 * stream, calls=4)
        assert seconds == pytest.approx(planned, rel=0.01), per_node


def test_lesson_6_asks_for_the_tokens_of_the_planners_group():
    text = (ROOT / "scripts/06_zero_fsdp.py").read_text("utf-8")
    formula = re.search(r'compare\("tokens per GPU that hide a gather", "guess_tokens", (.*), "tokens"\)', text)[1]
    assert eval(formula) == pytest.approx(hides(64), rel=0.01)  # noqa: S307


@pytest.mark.parametrize(
    ("order", "stride"), [(("data", "pipeline", "tensor"), 1), (("tensor", "pipeline", "data"), 4)]
)
def test_lesson_10_waits_for_tensor_messages_as_long_as_the_planner_says(order, stride):
    sizes = {"data": 2, "pipeline": 2, "tensor": 4}
    sent = {"data": 0, "pipeline": 0, "tensor": 1.5 * 8 * 16 * 4 * 2 * 8 * 2048 * 4096}
    given = {"SIZES": sizes, "PER_NODE": 8, "SENT": sent, "BEHIND_S": dict.fromkeys(sizes, 0), "FAST": 450e9}
    lesson = taken_from(
        "10_meshes_and_planning", "coordinates", "groups_of", "exposed_s", "waited_ms", SLOW=50e9, **given
    )
    assert lesson.waited_ms(order)["tensor"] == pytest.approx(1e3 * tensor_s(stride), rel=0.01)


def virtual(ranks, on_a_node, length):
    """(virtual seconds, sum) of an all-reduce by ranks with a card of 50 kB/s each, and no latency."""
    net = VirtualNetwork(ranks, Link(0.0, 450e3), Link(0.0, 50e3), ranks_per_node=on_a_node)
    x = torch.arange(length, dtype=torch.float64) + ranks.rank
    net.all_reduce(x)
    return net.clock_s, x.tolist()


@pytest.mark.parametrize(
    ("n", "on_a_node", "length"), [(4, 4, 48), (4, 2, 48), (4, 1, 48), (8, 4, 320), (6, 2, 360), (4, 2, 7)]
)
def test_the_virtual_network_and_the_planner_have_the_same_cards(pool, n, on_a_node, length):
    machine = replace(H100, gpus_per_node=on_a_node, inside_bytes_per_s=450e3, between_bytes_per_s=50e3)
    planned = group(n, machine=machine)
    for clock_s, total in pool.run(n, virtual, on_a_node, length):
        assert total == [n * i + n * (n - 1) / 2 for i in range(length)]
        if length > 8:  # else parts are of unequal length
            volume = 2 * (n - 1) / n * 8 * length
            assert clock_s == pytest.approx(volume / planned.bytes_per_s, rel=1e-9)
