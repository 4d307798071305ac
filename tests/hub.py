"""A JupyterHub on loopback with two users, set up as assets/site/hub.md tells an administrator to.

    with shared_by_a_class() as sw, Hub(sw, accounts=False) as hub:
        user = hub.users["user1"]                   # logged in, with a server of his own
        user.terminal("make doctor")
        kernel = user.kernel("many-hands/notebooks")

`make test-full` installs JupyterHub and its proxy into .venv/hub; the course's environment has neither.
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import psutil
import websocket
from manyhands.course import handouts
from manyhands.course.folders import ROOT

INSTALLED = Path(sys.prefix) / "hub"
USERS = "user1", "user2"
UIDS = 61_001, 61_002
TYPED = re.search(r"```bash\n(cp -r .*)\n```", (ROOT / "assets" / "site" / "hub.md").read_text())[1]

CONFIG = """
c.JupyterHub.bind_url = "http://127.0.0.1:{ports[0]}/"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{ports[1]}"
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{ports[2]}"
c.ConfigurableHTTPProxy.command = ["{installed}/node_modules/.bin/configurable-http-proxy"]
c.JupyterHub.authenticator_class = "dummy"
c.Authenticator.allowed_users = {users}
c.JupyterHub.services = [{{"name": "test", "api_token": "{token}"}}]
c.JupyterHub.load_roles = [
    {{"name": "test", "services": ["test"], "scopes": ["admin:users", "admin:servers", "tokens"]}}
]
c.Spawner.cmd = ["{installed}/bin/jupyterhub-singleuser"]
c.Spawner.environment = {environment}
c.Spawner.start_timeout = 120
c.Spawner.http_timeout = 120
"""
# one account for both: what keeps them apart is the course, not the permissions of files
ONE_ACCOUNT = """
c.JupyterHub.spawner_class = "simple"
c.SimpleLocalProcessSpawner.home_dir_template = "{folder}/{{username}}"
c.Spawner.args = ["--allow-root"]
"""
# an account each, which only the hub and its children see: $1 holds passwd and group, then come paths that accounts
# must reach although a folder above them, such as root's home, is closed to them
NAMESPACE = """
set -e
mount --bind "$1/passwd" /etc/passwd
mount --bind "$1/group" /etc/group
closed=$2 open=$3; shift 3
if [ -n "$closed" ]; then
    mkdir -p /run/manyhands-hub && mount -t tmpfs none /run/manyhands-hub
    mkdir /run/manyhands-hub/kept && mount --bind "$open" /run/manyhands-hub/kept
    mount -t tmpfs -o mode=755 none "$closed"
    mkdir -p "$open" && mount --bind /run/manyhands-hub/kept "$open"
fi
exec "$@"
"""


@contextmanager
def shared_by_a_class():
    """Yield a folder with what `make copy` and `make shared` put there: many-hands and manyhands. All can read it.

    The environment is built on this one, as on a site's Python that has torch and MPI.
    """
    folder = Path(tempfile.mkdtemp(prefix="mh-sw-"))
    try:
        folder.chmod(0o755)
        course = handouts.copy(folder / "many-hands", ROOT)
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MAKEFLAGS")}
        environ["PATH"] = os.pathsep.join([f"{sys.prefix}/bin", environ["PATH"]])
        environ["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib"  # of this environment's MPI, as a site's module would
        words = ["make", "shared", f"PREFIX={folder / 'manyhands'}", f"SITE_PYTHON={sys.executable}"]
        done = subprocess.run(words, cwd=course, env=environ, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "warning" not in done.stdout + done.stderr, done.stdout + done.stderr
        yield folder
    finally:
        shutil.rmtree(folder)


class Hub:
    """`with Hub(sw, accounts) as hub`: `users` by name, `folder` with their homes. `environment`: of their servers.

    sw: the folder of `shared_by_a_class`.

    accounts: each user has an account and a home of mode 0700; needs root.
    """

    def __init__(self, sw, accounts, **environment):
        self.sw, self.accounts, self.token = sw, accounts, uuid.uuid4().hex
        # the course's own recommendation for many users of a node
        self.environment = {"MANYHANDS_PATIENCE": "10", **environment}

    def __enter__(self):
        assert (INSTALLED / "complete").exists(), f"no JupyterHub in {INSTALLED}; `make test-full` installs it"
        self.folder = Path(tempfile.mkdtemp(prefix="mh-hub-"))
        self.folder.chmod(0o755)
        self.log = self.folder / "hub.log"
        self.folder.joinpath("state").mkdir(mode=0o700)
        ports = _free_ports(3)
        values = {"ports": ports, "installed": INSTALLED, "users": {*USERS}, "folder": self.folder, "token": self.token}
        config = (CONFIG + ONE_ACCOUNT * (not self.accounts)).format(**values, environment=self.environment)
        (self.folder / "state" / "config.py").write_text(config)
        command = [INSTALLED / "bin" / "jupyterhub", "-f", "config.py"]
        for name, uid in zip(USERS, UIDS, strict=True):
            (self.folder / name).mkdir(mode=0o700)
            if self.accounts:
                os.chown(self.folder / name, uid, uid)
        if self.accounts:
            command = [*self._namespace(), *command]
        # `python3` and `make` are the machine's; variables of the tests are not for the hub
        path = [INSTALLED / "bin", Path(sys.base_prefix) / "bin", "/usr/local/bin", "/usr/bin", "/bin"]
        environ = {"PATH": os.pathsep.join(map(str, path)), "HOME": str(self.folder / "state"), "LANG": "C.UTF-8"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder / "state", env=environ, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self.address = f"http://127.0.0.1:{ports[0]}"
            self.api = httpx.Client(
                base_url=f"{self.address}/hub/api/", headers={"Authorization": f"token {self.token}"}, timeout=60
            )
            self._wait(self._answers)
            with ThreadPoolExecutor(len(USERS)) as at_once:
                self.users = dict(zip(USERS, at_once.map(partial(User, self), USERS), strict=True))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _namespace(self):
        """Return the command in front of the hub's, which gives the users their accounts; see NAMESPACE."""
        for file, line in (("passwd", "{0}:x:{1}:{1}::{2}/{0}:/bin/bash\n"), ("group", "{0}:x:{1}:\n")):
            added = "".join(line.format(*user, self.folder) for user in zip(USERS, UIDS, strict=True))
            (self.folder / file).write_text(Path("/etc", file).read_text().rstrip("\n") + "\n" + added)
        python = Path(sys.base_prefix).resolve()
        closed = [str(path) for path in reversed(python.parents) if not path.stat().st_mode & 0o001][:1]
        words = [str(self.folder), *(closed or [""]), str(python)]
        return ["unshare", "--mount", "--propagation", "private", "bash", "-c", NAMESPACE, "bash", *words]

    def _answers(self):
        try:
            return self.api.get("users").status_code == 200
        except httpx.TransportError:
            return False

    def _wait(self, happened, patience_s=120):
        deadline = time.monotonic() + patience_s
        while not happened():
            said = [line for line in self.log.read_text().splitlines() if " 200 GET " not in line]
            assert self.process.poll() is None and time.monotonic() < deadline, "\n".join(said[-60:])
            time.sleep(0.5)

    def start(self, name):
        self.api.post(f"users/{name}/server").raise_for_status()
        self._wait(lambda: self.api.get(f"users/{name}").json()["servers"].get("", {}).get("ready"))

    def stop(self, name):
        self.api.delete(f"users/{name}/server").raise_for_status()
        self._wait(lambda: not self.api.get(f"users/{name}").json()["servers"])

    def __exit__(self, *error):
        family = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.terminate()  # it stops the users' servers, and they their kernels
        _, left = psutil.wait_procs(family, timeout=30)
        for process in left:
            process.kill()
        self.process.kill()
        self.process.wait(30)
        shutil.rmtree(self.folder)


class User:
    """A user of the hub, with a running server and his own token."""

    def __init__(self, hub, name):
        self.hub, self.name, self.home = hub, name, hub.folder / name
        hub.start(name)
        token = hub.api.post(f"users/{name}/tokens").json()["token"]
        self.headers = {"Authorization": f"token {token}"}
        self.server = httpx.Client(base_url=f"{hub.address}/user/{name}/", headers=self.headers, timeout=60)

    def connect(self, path):
        address = f"{self.server.base_url}{path}".replace("http:", "ws:")
        return websocket.create_connection(address, header=self.headers, timeout=240)

    def terminal(self, command, until=None):
        """Type a command into a terminal of JupyterLab. Returns what it printed until it ended, or until a match."""
        name = self.server.post("api/terminals").raise_for_status().json()["name"]
        shell = self.connect(f"terminals/websocket/{name}")
        end = until or r"\nended with (\d+)\r"
        shell.send(json.dumps(["stdin", command + ("\r" if until else "; echo ended with $?\r")]))
        printed = ""
        while not (found := re.search(end, printed)):
            kind, *content = json.loads(shell.recv())
            printed += content[0] if kind == "stdout" else ""
        shell.close()
        assert until or found[1] == "0", printed
        return printed

    def set_up(self):
        """Type what hub.md tells each attendee to type."""
        self.terminal(TYPED.replace("/sw/", f"{self.hub.sw}/"))

    def kernel(self, folder):
        asked = {"name": "manyhands", "path": folder}
        made = self.server.post("api/kernels", json=asked).raise_for_status().json()
        return Kernel(self.connect(f"api/kernels/{made['id']}/channels"))


class Kernel:
    """A kernel behind the hub: `run(code)` returns what the cell printed."""

    def __init__(self, socket):
        self.socket = socket

    def run(self, code):
        header = {"msg_id": uuid.uuid4().hex, "msg_type": "execute_request", "session": "test", "version": "5.3"}
        header |= {"username": "", "date": "2026-01-01T00:00:00Z"}
        content = {"code": code, "silent": False, "allow_stdin": False, "stop_on_error": True}
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": content, "channel": "shell"}
        self.socket.send(json.dumps(message))
        printed = ""
        while True:
            got = json.loads(self.socket.recv())
            kind, content = got["msg_type"], got["content"]
            if got["parent_header"].get("msg_id") != header["msg_id"]:
                continue
            if kind == "stream":
                printed += content["text"]
            if kind in ("display_data", "update_display_data"):  # what ranks print
                printed += content["data"].get("text/plain", "") + "\n"
            assert kind != "error", f"{code}\n{printed}\n{content['ename']}: {content['evalue']}"
            if kind == "status" and content["execution_state"] == "idle":
                return printed


def _free_ports(n):
    sockets = [socket.socket() for _ in range(n)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
