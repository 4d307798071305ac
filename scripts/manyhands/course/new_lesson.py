"""Write the skeleton of a lesson of your own: a notebook and a script that run at once, with one build and its check.

    make lesson NAME=17_mine TITLE="Our network"
    python -m manyhands.course.new_lesson NAME --title TITLE

Its first cell is tagged `own`: the site and the preflight have it, and the course's tests leave it alone.
"""

import argparse
import re

from manyhands.course.folders import write_whole
from manyhands.course.lessons import Lesson, course_here, find_lessons
from manyhands.course.pairs import PairError, reported, sync

SKELETON = '''\
# ---
# jupyter:
#   jupytext:
#     formats: notebooks///ipynb,scripts///py:percent
#   kernelspec:
#     display_name: Many Hands
#     language: python
#     name: manyhands
# ---

# %% [markdown] tags=["own"]
# # @NUMBER@ @TITLE@
#
# **10 minutes** for the sections marked CORE, 10 with those marked MORE.
#
# After this lesson **you can**
# - average a number over all ranks.
#
# **You need** [rank](../assets/glossary.md#rank) ([lesson 00](00_start.ipynb)).

# %% [markdown] tags=["notes"]
# <details><summary>For the instructor: the whole lesson</summary>
#
# Attendees do not get this cell. *Say:* who has the sum afterwards?
#
# </details>

# %% [markdown]
# ## Start (CORE, 2 min)

# %% tags=["parameters"]
n_ranks = 4  # processes; in a script the launcher decides
numbers = 5  # numbers on each rank, at least 1

# %% tags=["active-ipynb"]
# import sys; sys.path.insert(0, "../scripts")
# from manyhands.notebook.start import start_ranks
#
# hands = start_ranks("@NAME@", globals())

# %%
# %%ranks
import torch.distributed as dist
from manyhands import Metrics, ____, join, leave, say
from manyhands.checks import exercise
from manyhands.checks.drawn import normal
from manyhands.checks.expect import expect_tensor

ranks = join(globals())
metrics = Metrics(ranks)

# %% [markdown]
# ## The mean over all ranks (CORE, 8 min)
#
# ### Build A: the mean
#
# Every rank has a tensor, and all of them need the mean. Replace the blank, `____`.


# %%
# %%ranks
def mean_over_ranks(x):
    """Return the mean of all ranks' tensors; x stays as it is."""
    total = x.clone()
    dist.all_reduce(total)
    return ____  # your turn


# %% jupyter={"source_hidden": true}
# %%ranks
@exercise("A", "the mean")
def check_mean(answer, ranks):
    everyones = [normal(rank, numbers).to(ranks.device) for rank in range(ranks.world_size)]
    total, mine = sum(everyones), everyones[ranks.rank]
    slips = {"that is the sum": total, "that is this rank's own": mine}
    expect_tensor(answer(mine.clone()), total / ranks.world_size, "what you return", slips, "the mean over the ranks")


check_mean(mean_over_ranks, ranks)

# %% [markdown] tags=["solution"]
# <details><summary>Solution A</summary>
#
# ```python
# def mean_over_ranks(x):
#     total = x.clone()
#     dist.all_reduce(total)
#     return total / dist.get_world_size()
# ```
#
# </details>

# %%
# %%ranks
mean = mean_over_ranks(normal(ranks.rank, numbers).to(ranks.device))
say(f"the first number of the mean is {mean[0].item():.3f}")
metrics.close(first=mean[0].item())

# %% [markdown]
# ## Recap
#
# - After an all-reduce every rank has the result.

# %% [markdown]
# ## End

# %%
# %%ranks
metrics.write()
leave()

# %% tags=["active-ipynb"]
# hands.stop()
'''


def write_skeleton(name, title, root):
    """Write notebook and script of the lesson `name`, such as "17_mine". Return a sentence on it.

    Raise PairError, and write nothing, for a name that is none or a number that is taken.
    """
    if not re.fullmatch(r"\d\d_[a-z][a-z0-9_]*", name):
        raise PairError(f'NAME={name!r} is no name of a lesson; as in make lesson NAME=17_mine TITLE="Our network"')
    lesson = Lesson(name, root)
    taken = {one.number: one.name for one in find_lessons(root)}
    there = [path.name for folder in ("notebooks", "scripts") for path in (root / folder).glob(f"{lesson.number}_*")]
    if lesson.number in taken or there:
        free = next(f"{number:02}" for number in range(17, 100) if f"{number:02}" not in taken)
        has = taken.get(lesson.number) or " and ".join(there)
        raise PairError(f"{lesson.number} is taken by {has}; a free number is {free}")
    text = SKELETON.replace("@NUMBER@", lesson.number).replace("@NAME@", name)
    write_whole(lesson.script, text.replace("@TITLE@", " ".join(title.split()) or name[3:].replace("_", " ")))
    sync(lesson)
    then = f"make sync notebooks lesson-check LESSON={lesson.number}"
    return f"wrote notebooks/{name}.ipynb and scripts/{name}.py, which run as they are; after a change: {then}"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="such as 17_mine")
    parser.add_argument("--title", default="")
    options = parser.parse_args(arguments)
    return reported(lambda: write_skeleton(options.name, options.title, course_here()))


if __name__ == "__main__":
    from manyhands.launch.entry import run_program

    run_program("lesson", main)
