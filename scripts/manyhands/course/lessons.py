"""The lessons of a course, found by their files, and what a short run of each looks like.

A lesson is a pair `scripts/NN_topic.py` and `notebooks/NN_topic.ipynb` that the course has. A pair of a centre's own is
one, too, where its number is free and git tracks it or its header declares it. Any other file there is somebody's own.

Tests and `make preflight` run lessons headless; their short parameters and the aims for a run of full length live here
and nowhere else.
"""

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from manyhands.course.folders import ROOT

ORIGINALS = ".originals"  # in an attendee's copy, which has no git: the lessons as they were handed out
OWN = re.compile(r'^# %% \[markdown\].* tags=\[[^\]]*"own"', re.M)  # a cell of a centre's own lesson
PAIRED = "notebooks///ipynb,scripts///py:percent"  # what the header of a lesson's two forms tells jupytext

# About 10 s of work on 2 cores; every name is one of the lesson's parameters.
SHORT = {
    "00_start": {"iterations": 20},
    "01_one_device": {"repeats": 2, "peak_s": 0.05},
    "02_collectives": {"largest_mib": 0.02, "repeats": 1, "wait_s": 2.0, "points": 100_000},
    "03_data_parallel": {"steps": 6, "repeats": 1},
    "04_first_job": {"steps": 10, "job_flags": "--steps 4 --repeats 1"},
    "05_same_science": {"steps": 4, "sweep_tokens": 2048, "repeats": 1},
    "06_zero_fsdp": {"layers": 2, "steps": 2},
    "07_tensor_parallel": {"layers": 1, "sequences": 2, "steps": 3},
    "08_pipeline_parallel": {"micro_batches": 4, "rows": 1},
    "09_context_and_experts": {"positions": 32, "tokens": 32, "steps": 10, "seeds": 1},
    "10_meshes_and_planning": {"layers": 2, "gpus": 8},
    "11_when_it_breaks": {"steps": 16, "wait_s": 2.0, "state_mib": 2, "repeats": 2, "failures": "none"},
    "12_llm_pretraining": {"merges": 48, "hashes": 64, "live_flops": 2e9, "zoo_steps": 10, "lab_steps": 10},
    "13_llm_alignment": {"base_steps": 2, "sft_steps": 2, "dpo_steps": 2, "rl_steps": 2, "seeds": 1},
    "14_llm_serving": {"texts": 2, "draws": 600},
    "15_on_your_cluster": {"layers": 2, "largest": 64, "repeats": 2},
}

AIM_S = 90  # a lesson of full length, headless, 2 cores, 4 ranks
AIM_LONG_S = 180  # for the lessons on language models
LONG = {"12", "13", "14"}
AIM_BYTES = 3 * 2**30  # memory of all its processes together


@dataclass(frozen=True)
class Lesson:
    """One lesson: its name ("02_collectives") and where its two files are, or should be."""

    name: str
    root: Path

    @property
    def number(self):
        return self.name.split("_", 1)[0]

    @property
    def script(self):
        return self.root / "scripts" / f"{self.name}.py"

    @property
    def notebook(self):
        return self.root / "notebooks" / f"{self.name}.ipynb"

    @property
    def own(self):
        """Return whether this is a centre's own lesson: its first cell is tagged `own`."""
        return self.script.is_file() and bool(OWN.search(self.script.read_text("utf-8", errors="replace")))

    @property
    def short(self):
        """Parameters of a short run."""
        return SHORT.get(self.name, {})

    @property
    def aim_s(self):
        return AIM_LONG_S if self.number in LONG else AIM_S

    def beyond_aims(self, seconds, peak_bytes):
        """Return what a headless run of full length takes beyond its aims, as a sentence, or ""."""
        found = []
        if seconds > self.aim_s:
            found.append(f"{seconds:.0f} s where {self.aim_s} s are the aim")
        if peak_bytes > AIM_BYTES:
            found.append(f"{peak_bytes / 2**30:.1f} GiB where {AIM_BYTES / 2**30:.0f} GiB are the aim")
        return " and ".join(found)


def course_here():
    """The course whose lessons a command means: that of the current folder, else the one around this package."""
    return Path.cwd() if (Path.cwd() / "notebooks").is_dir() else ROOT


def find_lessons(root=ROOT, only=(), own=True):
    """The lessons below `root` in order of their numbers; `only` names some ("03", "3" or "03_data_parallel").

    Without `only` those that are there in one form at least; a lesson that is named may have lost both. With `own`
    False a centre's own ones are left out.
    Raises ValueError, naming the lessons that exist, if one of `only` does not exist.
    """
    taken, claims = _taken(Path(root))
    lessons = [Lesson(name, Path(root)) for name in sorted(taken.values())]
    there = [lesson for lesson in lessons if lesson.notebook.exists() or lesson.script.exists()]
    if not only:
        return [lesson for lesson in there if own or not lesson.own]
    known = {key: lesson for lesson in lessons for key in (lesson.name, lesson.number)}
    wanted = {name: known.get(name) or known.get(name.zfill(2)) for name in only}
    for name, lesson in wanted.items():
        if lesson is None:
            names = ", ".join(lesson.name for lesson in there) or f"none in {root}"
            why = "".join(f" ({said})" for said in _none_of_them(taken, claims, name[:2].zfill(2)))
            raise ValueError(f"there is no lesson {name!r}{why}; the lessons are: {names}")
    return [lesson for lesson in lessons if lesson in wanted.values()]


def left_alone(root=ROOT, only=()):
    """Return sentences on files below `root` that look like lessons and are none, and on lessons that are not there.

    `only`: as for `find_lessons`; the sentences are about the numbers of these.
    """
    root, numbers = Path(root), {name[:2].zfill(2) for name in only}
    taken, claims = _taken(root)
    said = [sentence for number in sorted(numbers or claims) for sentence in _none_of_them(taken, claims, number)]
    own = sorted(path.stem for path in root.glob("notebooks/*.ipynb") if not re.match(r"\d\d_", path.stem))
    if own and not only:
        said.append(f"left alone, since they are no lessons: {', '.join(own)}")
    for number, name in sorted(taken.items()):
        gone = Lesson(name, root)
        if not (only or gone.notebook.exists() or gone.script.exists()):
            said.append(f"{name} is not here; `make reset LESSON={number}` brings it back")
    return said


def _none_of_them(taken, claims, number):
    """Yield a sentence on the names that claim this number and are no lessons."""
    if others := sorted(claims.get(number, set()) - {taken.get(number)}):
        if number in taken:
            yield f"left alone: {', '.join(others)}, since {number} is {taken[number]}"
        elif len(others) > 1:
            yield f"left alone: {' and '.join(others)}, since both claim {number}; give one of them a free number"
        else:
            yield f"left alone: {others[0]}, since its header declares no lesson and git does not track the pair"


def _taken(root):
    """Return ({number: the name of its lesson}, {number: all names that claim it}) of the course below `root`.

    Whoever comes first takes a number: an attendee's original, a lesson of this package, what git has, what git will
    have, what declares itself. Where two come at once, neither does.
    """
    files = [*root.glob("scripts/[0-9][0-9]_*.py"), *root.glob("notebooks/[0-9][0-9]_*.ipynb")]
    here = {path.stem for path in files}
    originals = {path.stem for path in (root / ORIGINALS).glob("notebooks/[0-9][0-9]_*.ipynb")}
    committed = _pairs_in_git(root, "ls-tree", "-z", "--name-only", "HEAD", "notebooks/", "scripts/")
    tracked = _pairs_in_git(root, "ls-files", "-z", "notebooks", "scripts")
    known = originals | SHORT.keys() | committed | tracked
    declared = {path.stem for path in files if path.stem not in known and _declares(path)}
    taken, claims = {}, {}
    for names in (originals, SHORT.keys() & (here | committed), committed, tracked, declared):
        for number in {name[:2] for name in names} - claims.keys():
            claims[number] = {name for name in names if name[:2] == number}
            if len(claims[number]) == 1:
                (taken[number],) = claims[number]
    for name in here:
        claims.setdefault(name[:2], set()).add(name)
    return taken, claims


def _pairs_in_git(root, *words):
    """Return the names of the pairs that git lists; none where there is no git."""
    try:
        listed = subprocess.run(["git", *words], cwd=root, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return set()
    names = set(listed.decode(errors="replace").split("\0"))
    found = {name[len("scripts/") : -len(".py")] for name in names if re.fullmatch(r"scripts/\d\d_[^/]+\.py", name)}
    return {name for name in found if f"notebooks/{name}.ipynb" in names}


def _declares(path):
    """Return whether a notebook or script says that it is a lesson, and not the copy of another one."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return False
    started = re.findall(r"""start_ranks\(\\?["'](\d\d_[^"'\\]+)""", text)
    return PAIRED in text and set(started) <= {path.stem}
