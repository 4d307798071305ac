"""`python -m manyhands.plots [folder]`: redraw every figure of the lessons (into assets/)."""

import sys

from manyhands.course.folders import ASSETS
from manyhands.plots import redraw

for path in redraw(*(sys.argv[1:2] or [ASSETS])):
    print(path)
