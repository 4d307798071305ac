"""An answer that never ends: the notebook frees its ranks, which keep their variables and their group."""

import pytest
from notebook_kernel import JOIN, Kernel

pytestmark = pytest.mark.ranks

ANSWERS = """%%ranks
from manyhands.checks import collectives as checks
kept = 42
def loops(*_):
    while True: pass
def right(points, count):
    share = torch.tensor(points // 2 + (rank < points % 2))
    hits = torch.tensor(count(share, rank))
    dist.reduce(hits, 0)
    return 4 * hits.item() / points if rank == 0 else None
"""


@pytest.fixture(scope="module")
def notebook(tmp_path_factory, root):
    """A kernel with two joined ranks that know some answers."""
    with Kernel(tmp_path_factory.mktemp("course"), root) as kernel:
        assert "2 ranks on this machine" in kernel.start(2).text
        assert kernel.run(JOIN).error is None
        assert kernel.run(ANSWERS).error is None
        yield kernel


def test_an_answer_that_never_ends_is_freed_and_the_variables_are_kept(notebook):
    stopped = notebook.run("%%ranks --timeout 4\nchecks.estimate_pi(loops, ranks)")
    assert "did not end within 4 s" in stopped.error[1]
    after = notebook.run("%%ranks\nchecks.estimate_pi(right, ranks); say(kept)")
    assert after.error is None, after.error
    assert "(pi with one reduce): correct" in after.text and "42" in after.text
