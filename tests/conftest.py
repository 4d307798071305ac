"""What every test shares: the course's folders, and an environment in which nothing is written into the tree."""

import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from rank_pool import RankPool  # noqa: E402

# on a busy machine an example may take a second: that is no fault of what is tested
settings.register_profile("course", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("course")


@pytest.fixture(scope="session")
def root():
    return ROOT


@pytest.fixture(scope="session")
def pool():
    """Up to eight ranks that stay for all tests: `pool.run(n, function, *args)`; see rank_pool."""
    with RankPool(8) as ranks:
        yield ranks


@pytest.fixture(autouse=True)
def _outputs_outside_the_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("MANYHANDS_OUTPUTS", str(tmp_path / "outputs"))


# Lessons compute: they run one after the other in one process, while the other process begins with what mostly waits for a
# scheduler, a browser or a time-out. Ranks of two lessons at once would only take turns on the cores.
COMPUTE = ("test_lessons", "test_sections", "test_side_by_side")
WAIT = ("test_slurm", "test_train_jobs", "test_browser", "test_ranks", "test_preflight", "test_stalls")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Tests of one file share what starts slowly: with `-n` each file stays in one process, and the lessons' in the same."""
    places = {name: place for place, name in enumerate((*COMPUTE, *WAIT))}
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    for item in items:
        file = item.path.stem
        item.add_marker(pytest.mark.xdist_group("lessons" if file in COMPUTE else file))
