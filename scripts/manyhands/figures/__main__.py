"""`python -m manyhands.figures [folder]`: redraw every figure of the lessons (into assets/)."""

import sys

from manyhands.figures import ASSETS, redraw

for path in redraw(*(sys.argv[1:2] or [ASSETS])):
    print(path)
