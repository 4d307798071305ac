"""Several users on one machine, and a course that nobody may write to."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons
from manyhands.launch.metrics import compare
from manyhands.tools.lesson_run import Run, find_metrics

pytestmark = [pytest.mark.ranks, pytest.mark.lesson]

START = find_lessons(ROOT, ["00"])[0]
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


def test_two_torchruns_and_two_mpiexecs_at_once_do_not_collide(tmp_path):
    def run(number):
        way = "torchrun" if number < 2 else "mpiexec"
        return Run(START, way, 2, tmp_path / f"user{number}", START.short).carry_out(timeout_s=200)

    with ThreadPoolExecutor(4) as users:
        outcomes = list(users.map(run, range(4)))
    assert [outcome.error for outcome in outcomes] == [None] * 4
    for outcome in outcomes[1:]:
        assert compare(outcomes[0].metrics, outcome.metrics) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting the course read-only needs root")
@pytest.mark.skipif(shutil.which("unshare") is None, reason="mounting the course read-only needs unshare")
def test_a_read_only_course_runs_and_its_outputs_go_to_the_users_own_place(tmp_path):
    environ = {k: v for k, v in os.environ.items() if k != "MANYHANDS_OUTPUTS"} | {"HOME": str(tmp_path)}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in START.short.items()]
    notebook = ["-m", "papermill", START.notebook, tmp_path / "done.ipynb", "-k", "manyhands", "--no-progress-bar"]
    parameters = [word for name, value in {**START.short, "n_ranks": 2}.items() for word in ("-p", name, str(value))]
    ways = [START.script, *flags], [*notebook, "--cwd", START.notebook.parent, *parameters]
    for number, words in enumerate(ways, 1):
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, str(ROOT), sys.executable]
        done = subprocess.run(
            [*command, *words], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
        outputs = tmp_path / ".local" / "share" / "manyhands" / "outputs"
        assert find_metrics(outputs)["lesson"] == START.name
        runs = [path for path in (outputs / START.name).iterdir() if not path.is_symlink()]
        assert len(runs) == number
