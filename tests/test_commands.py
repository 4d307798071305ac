"""The commands of README and the guides exist as written, with their flags; `make jobs` and plan.py run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest
from manyhands.course.folders import ROOT
from manyhands.data.tokenizer import tokenizer_of_folder
from test_chat_templates import CHATML, folder_with

pytestmark = [pytest.mark.ranks, pytest.mark.full]

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "jobs" / "README.md", *ROOT.glob("assets/site/*.md")]
OURS = r"(?:[A-Z_]+=\S+ )*(?:make|python3?|sbatch|qsub|bash|mpiexec|pip)\b"
# programs of the system, with the options that pages give them: nothing of ours can break them
OTHERS = {
    "cp", "conda", "git", "pre-commit", "py-spy", "qdel", "qstat", "scancel", "scontrol", "source", "squeue", "ss",
    "mkdir", "pbs_rstat", "pbs_rsub", "tar",
}  # fmt: skip
PROGRAM_OF_TARGET = {"preflight": "preflight.py", "serve": "serve.py", "doctor": "doctor.py", "bench": "bench.py"}
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")


def commands():
    """Yield (page, command) of each line of a bash block, and of each command of ours that stands in a sentence."""
    for page in PAGES:
        text, name = page.read_text("utf-8"), page.relative_to(ROOT).as_posix()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.S | re.M):
            yield from ((name, line) for line in block.replace("\\\n", " ").splitlines() if line.split("#")[0].strip())
        for words in re.findall(rf"`({OURS} [^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
            if not re.search(r"\.\.\.|<|\bNN\b|=name\b", words):  # a place for the reader's own word
                yield name, " ".join(words.split())


@cache
def help_of(*program):
    """Return what `python PROGRAM --help` prints."""
    command = [sys.executable, *program, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def unknown_flags(words, *program):
    """Return the flags among `words` that the help of a program does not name."""
    known = {"--help", *re.findall(r"(?<![\w-])--?[\w][\w.-]*", help_of(*program))}
    flags = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    return [flag for flag in flags if flag not in known and re.sub(r"(--|\.)no-", r"\1", flag) not in known]


def program_and_flags(words):
    """Return (the program of ours that a command starts, the words for it), without launchers and schedulers."""
    if "scripts/launch.py" in words:
        own = words[words.index("scripts/launch.py") + 1 :]
        at = own.index("--") if "--" in own else len(own)
        own, rest = own[:at], own[at + 1 :]
        program = own.pop() if own and own[-1].endswith(".py") else "scripts/train.py"
        assert unknown_flags(own, "scripts/launch.py") == []
        begins = program in ("scripts/align.py", "scripts/serve.py")  # with a method, with a model
        assert not rest or rest[0].startswith("-") or begins, f"behind -- stand flags of {program}, not {rest[0]}"
        return program, rest
    at = next(place for place, word in enumerate(words) if re.match(r"(scripts|tests)/\S+\.py$|jobs/", word))
    rest = words[at + 1 :]
    if words[at].startswith("jobs/"):
        assert (ROOT / words[at]).is_file(), words[at]
        rest += [word for given in words[:at] for word in shlex.split(given.partition("_ARGS=")[2])]
        lesson = re.search(r"scripts/(\d\d_\w+)\.py -- ", (ROOT / words[at]).read_text("utf-8"))
        return lesson[0].split()[0] if lesson else "scripts/train.py", rest
    return words[at], rest


def of_make(words, folder):
    """Check `make TARGET VARIABLE=value`; run `make jobs` in a copy of the job files."""
    target, *given = words
    assert re.search(rf"^{target}:", MAKEFILE, re.M), f"there is no `make {target}`"
    variables = dict(word.split("=", 1) for word in given)
    assert [name for name in variables if not re.search(rf"\$(\({name}\)|\${name}\b)", MAKEFILE)] == []
    if target in PROGRAM_OF_TARGET and "ARGS" in variables:
        assert unknown_flags(shlex.split(variables["ARGS"]), f"scripts/{PROGRAM_OF_TARGET[target]}") == []
    if target == "jobs" and "SITE" in variables:
        for part in ("jobs", "scripts/manyhands"):
            shutil.copytree(ROOT / part, folder / part)
        shutil.copy(ROOT / "Makefile", folder)
        if not (folder / "jobs" / "sites" / f"{variables['SITE']}.toml").exists():  # the reader's own, from the generic
            shutil.copy(folder / "jobs/sites/generic.toml", folder / f"jobs/sites/{variables['SITE']}.toml")
        command = ["make", *words, f"PYTHON={sys.executable}"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_a_command_of_a_page_exists_with_its_flags(page, command, tmp_path):
    words = shlex.split(command, comments=True)
    while re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    first, *rest = words
    if first == "make":
        of_make(rest, tmp_path)
    elif first == "pip":
        extras = [extra for found in re.findall(r"\[([\w,]+)\]", command) for extra in found.split(",")]
        assert [extra for extra in extras if f"\n{extra} = [" not in (ROOT / "pyproject.toml").read_text("utf-8")] == []
    elif first in OTHERS:
        assert [word for word in rest if re.match(r"(jobs|scripts)/", word) and not (ROOT / word).exists()][1:] == []
    elif rest[:2] in (["-m", "pytest"], ["-m", "http.server"]):
        assert [word for word in rest if word.startswith("tests/") and not (ROOT / word).exists()] == []
    elif "manyhands.measure.trace" in rest:  # in front of a program of the reader's
        assert find_spec("manyhands.measure.trace")
    elif rest[:1] == ["-m"] and rest[1] != "torch.distributed.run":
        assert find_spec(rest[1]) and unknown_flags(rest[2:], "-m", rest[1]) == []
    elif rest[:1] == ["scripts/plan.py"] and "--from" not in rest:
        plot = [str(tmp_path / word) if word.endswith(".png") else word for word in rest]
        done = subprocess.run([sys.executable, *plot], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    else:
        program, flags = program_and_flags(words)
        assert (ROOT / program).is_file() and (program.startswith("tests/") or unknown_flags(flags, program) == [])


@pytest.mark.timeout(900)
def test_the_page_on_a_model_of_ones_own_runs_as_typed_with_fewer_steps(tmp_path):
    import transformers

    for name in ("SmolLM2-135M", "SmolLM2-135M-Instruct"):
        size = len(tokenizer_of_folder(folder_with(tmp_path / name, CHATML)).vocab)
        sizes = dict(vocab_size=size, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
        config = transformers.LlamaConfig(**sizes, max_position_embeddings=128, bos_token_id=0, eos_token_id=1)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / name)
    page = (ROOT / "assets" / "site" / "own_model.md").read_text("utf-8")
    page = re.sub(r"--train.steps \d+", "--train.steps 4", page)
    talk = re.search(r"^```json\n(.*?)^```", page, re.S | re.M)[1]
    (tmp_path / "talks.jsonl").write_text("".join(talk.replace("3?", f"{i}?") for i in range(20)))
    (tmp_path / "essays").mkdir()
    for i in range(3):
        text = "".join(f"Essay {i} says in line {k} that the sea is wide.\n" for k in range(40))
        (tmp_path / "essays" / f"{i}.txt").write_text(text)
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    path = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environ = os.environ | {"MANYHANDS_OUTPUTS": str(tmp_path / "runs"), "OMP_NUM_THREADS": "1", "PATH": path}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    said = {}
    for kind, block in re.findall(r"^```(bash|python)\n(.*?)^```", page, re.S | re.M):
        for typed in block.replace("\\\n", " ").splitlines() if kind == "bash" else [block]:
            command = ["bash", "-c", typed] if kind == "bash" else [sys.executable, "-c", typed]
            done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, typed + done.stdout + done.stderr
            said[" ".join(typed.split("#")[0].split())] = done.stdout
    planned = next(text for typed, text in said.items() if "plan.py" in typed)
    assert "the model in SmolLM2-135M: " in planned and "1. replicas 8" in planned
    dry = [text for typed, text in said.items() if "--dry-run" in typed]
    assert len(dry) == 2 and all("it fits: " in text for text in dry)
    assert "with LoRA alone" in dry[0] and "without LoRA a rank keeps" in dry[1]
    for name in ("mine-135m", "taught-135m"):
        about = json.loads((tmp_path / name / "config.json").read_text())
        assert about["dtype"] == "bfloat16" and (tmp_path / name / "chat_template.jinja").read_text() == CHATML
