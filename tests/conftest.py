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


# Where several files run at once (`-n 2 --dist loadfile`), one process begins with the lessons, which compute, and the others
# with what mostly waits for a scheduler, a browser or a time-out.
FIRST = (
    "test_lessons",
    "test_slurm",
    "test_train_jobs",
    "test_browser",
    "test_ranks",
    "test_preflight",
    "test_stalls",
)


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))
