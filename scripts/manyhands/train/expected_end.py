"""When a run will be over, said once, as soon as its first steps have shown how fast it is."""

import time

from manyhands.train.line_columns import seconds

SOON_S = 10.0  # of steps are enough to tell; fewer until the second line is there
WORTH_S = 60.0  # a run that is over by then needs no announcement


class ExpectedEnd:
    """`steps`: the run's last one. `now` (seconds) and `clock` (as time.time()) are for tests."""

    def __init__(self, steps, now, clock=time.time):
        self.steps, self.now, self.clock = steps, now, clock
        self.first, self.began, self.said = None, None, False

    def after(self, step, line):
        """A sentence after `step`, once, or None. `line`: whether a line of the report ends here. Reads the clock, no more.

        The first step, which warms up and may compile, does not count.
        """
        if self.said:
            return None
        if self.first is None:
            self.first, self.began = step, self.now()
            return None
        took_s = self.now() - self.began
        if not line and took_s < SOON_S:
            return None
        self.said, left = True, self.steps - step
        step_s = took_s / (step - self.first)
        if left * step_s < WORTH_S:
            return None
        end = time.strftime("%a %d %b, %H:%M", time.localtime(self.clock() + left * step_s))
        return f"{left:,} steps are left at about {seconds(step_s)} each: {duration(left * step_s)}, until {end}"


def duration(value):
    """Seconds for people, in two units at most: 4 min, 3 h 20 min, 2 days 3 h."""
    minutes = round(value / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(value / 3600), 24)
    return f"{days} day{'s' * (days > 1)}" + (f" {hours} h" if hours else "")
