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


def pytest_collection_modifyitems(items):
    for item in items:
        if "pool" in item.fixturenames:
            item.add_marker(pytest.mark.ranks)
