"""A real JupyterHub, set up as assets/site/hub.md says: two users at once, apart from each other, and the chat page."""

import json
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import nbformat
import psutil
import pytest
from hub import UIDS, USERS, Hub, shared_by_a_class
from manyhands.course.folders import ROOT
from manyhands.course.lessons import find_lessons
from manyhands.launch.processes import Family
from manyhands.notebook.engine_processes import MARK
from notebook_kernel import left_behind
from shortest import values

pytestmark = [pytest.mark.ranks, pytest.mark.lesson, pytest.mark.timeout(600)]

LESSON = find_lessons(ROOT, ["02"])[0]
N_RANKS = 2
JOIN = "%%ranks\nfrom manyhands import join\nranks = join(globals(), quiet=True)"
STORE = """%%ranks
import torch.distributed as dist
store = dist.distributed_c10d._get_default_store()
"""
SUM = """%%ranks
import torch
import torch.distributed as dist
number = torch.full((1,), {})
dist.all_reduce(number)
print("sum", float(number))
"""


def accounts_need_root(accounts):
    if accounts and os.geteuid() != 0:
        pytest.skip("an account for each user needs root; the same tests run with one account for both")


@pytest.fixture(scope="module")
def sw():
    with shared_by_a_class() as folder:
        yield folder


@pytest.fixture(scope="module", params=[False, True], ids=["one_account", "accounts"])
def hub(request, sw):
    accounts_need_root(request.param)
    with Hub(sw, request.param) as hub:
        with ThreadPoolExecutor(2) as at_once:
            list(at_once.map(lambda user: user.set_up(), hub.users.values()))
        yield hub


def run_lesson(user, together):
    """Run lesson 02's notebook; `together`: a barrier, passed when the ranks of both users are there. -> its Kernel."""
    kernel = user.kernel("many-hands/notebooks")
    notebook = nbformat.read(user.home / "many-hands" / "notebooks" / f"{LESSON.name}.ipynb", 4)
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.source != "hands.stop()":
            kernel.run(cell.source)
        if "parameters" in cell.metadata.get("tags", []):
            given = values(LESSON) | {"n_ranks": N_RANKS}
            kernel.run("\n".join(f"{name} = {value!r}" for name, value in given.items()))
        if "start_ranks(" in cell.source:
            together.wait(200)
    kernel.run(JOIN)  # the lesson's last cell has left
    return kernel


@pytest.fixture(scope="module")
def kernels(hub):
    """[the kernel of each user], after lesson 02, with its ranks."""
    together = threading.Barrier(2)
    with ThreadPoolExecutor(2) as at_once:
        return list(at_once.map(lambda user: run_lesson(user, together), hub.users.values()))


def held(processes, hub):
    """What processes hold: files in memory, in /tmp or in a home; ports on which they listen; ports they talk to."""
    files, listening, talking = set(), set(), set()
    for process in processes:
        places = [one.path for one in process.open_files() + process.memory_maps()]
        places += [process.cwd()]
        shared = (str(hub.sw), sys.prefix)  # the software, which both may read
        files |= {p for p in places if p.startswith(("/dev/shm", "/tmp")) and not p.startswith(shared)}
        for one in process.net_connections("tcp"):
            (listening if one.status == psutil.CONN_LISTEN else talking).add((one.raddr or one.laddr).port)
    return files, listening, talking


def test_two_users_run_lesson_02_at_once_and_neither_sees_anything_of_the_other(hub, kernels):
    marks = [kernel.run("print(hands.processes.mark)").strip() for kernel in kernels]
    families = [Family(mark, MARK).members() for mark in marks]
    pids = [{process.pid for process in family} for family in families]
    assert min(map(len, pids)) > N_RANKS and not pids[0] & pids[1]
    (files, listening, _), (other_files, _, other_talking) = (held(family, hub) for family in families)
    assert files and other_files and not files & other_files
    assert listening and not listening & other_talking

    # each user's ranks meet in a store of their own, and add up their own numbers
    for name, kernel in zip(USERS, kernels, strict=True):
        assert "True" not in kernel.run(STORE + "print(store.check(['user']))")
        kernel.run(STORE + f"store.set('user', {name!r})")
    for number, (name, kernel) in enumerate(zip(USERS, kernels, strict=True), 1):
        assert name in kernel.run(STORE + "print(store.get('user').decode())")
        assert f"sum {N_RANKS * number}.0" in kernel.run(SUM.format(float(number)))

    # what a run wrote lies in its user's own copy, and nothing of another user's beside it
    for user in hub.users.values():
        (metrics,) = user.home.glob(f"**/outputs/{LESSON.name}/latest/metrics.json")
        assert metrics.is_relative_to(user.home / "many-hands" / "outputs")
        assert json.loads(metrics.read_text())["world_size"] == N_RANKS
        runs = [path for path in metrics.parents[1].iterdir() if not path.is_symlink()]
        assert len(runs) == 1, "the other user's run is among them"

    first, second = hub.users.values()
    assert httpx.get(f"{second.server.base_url}api/contents", headers=first.headers).status_code == 403
    if hub.accounts:
        assert [{process.uids().real for process in family} for family in families] == [{uid} for uid in UIDS]
        path = first.home / "many-hands" / "README.md"
        code = f"try: print(open({str(path)!r}).read())\nexcept PermissionError: print('refused')"
        assert kernels[1].run(code) == "refused\n" and path.exists()


def test_the_chat_page_works_behind_the_hub(hub):
    user = hub.users[USERS[1]]
    printed = user.terminal("cd ~/many-hands && make serve", until=r"open http://127.0.0.1:(\d+)/#token=(\S+)")
    port, token = re.search(r"open http://127.0.0.1:(\d+)/#token=(\S+)", printed).groups()
    with httpx.Client(follow_redirects=True, timeout=60) as browser:
        login = f"{hub.address}/hub/login"
        browser.get(login)
        browser.post(login, data={"username": user.name, "password": "x", "_xsrf": browser.cookies["_xsrf"]})
        page = browser.get(f"{user.server.base_url}proxy/{port}/")
        assert page.status_code == 200 and 'base + "v1/chat/completions"' in page.text
        assert not re.findall(r'(?:src|href)="(?:/|https?:)', page.text), "an absolute address leaves the proxy's path"
        # as the page asks: the hub's cookie for the hub, the token for serve.py
        headers = {"Authorization": f"Bearer {token}", "Sec-Fetch-Mode": "cors", "Sec-Fetch-Site": "same-origin"}
        body = {"messages": [{"role": "user", "content": "HELLO"}], "max_tokens": 4}
        address = f"{user.server.base_url}proxy/{port}/v1/chat/completions"
        answer = browser.post(address, json=body, headers=headers | {"Origin": hub.address})
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["content"]
        assert browser.post(address, json=body, headers={"Authorization": "Bearer wrong"}).status_code == 401
    # another user has neither the page nor the model
    other = httpx.get(f"{user.server.base_url}proxy/{port}/", headers=hub.users[USERS[0]].headers)
    assert other.status_code == 403


def test_stopping_one_users_server_ends_that_users_ranks_and_no_others(hub, kernels):
    mark = kernels[0].run("print(hands.processes.mark)").strip()
    assert Family(mark, MARK).members()
    hub.stop(USERS[0])
    assert left_behind(mark, 60) == []
    assert f"sum {N_RANKS}.0" in kernels[1].run(SUM.format(1.0))
