"""Fetch the corpus once, so that no run needs the network.

    python scripts/prepare_data.py              # from the web into data/, or ~/.cache/manyhands
    python scripts/prepare_data.py --require    # status 1 where only the offline corpus is at hand
    MANYHANDS_SHAKESPEARE=~/input.txt python scripts/prepare_data.py    # from a file that you have
    MANYHANDS_DATA=/shared/course python scripts/prepare_data.py        # into a folder that a class shares

You should see one line: where the file lies, or what the lessons will use instead. Status 2: a wrong file, a
corrupt download or a full disk, with the cure.
"""

import argparse
import sys

from manyhands.data import shakespeare


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--require", action="store_true", help="status 1 if there is no Shakespeare")
    arguments = parser.parse_args()
    try:
        path, why_not = shakespeare.prepare()
    except shakespeare.DataError as error:
        print(error, file=sys.stderr)
        return 2
    print(shakespeare.prepared_notice(path) if path else shakespeare.offline_notice(why_not))
    return 1 if path is None and arguments.require else 0


if __name__ == "__main__":
    sys.exit(main())
