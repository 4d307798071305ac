"""Fetch the corpus once, so that no run needs the network; or make a text of your own ready to train on.

    python scripts/prepare_data.py              # from the installed plays into data/, or ~/.cache/manyhands
    python scripts/prepare_data.py --require    # status 1 where only the offline corpus is at hand
    MANYHANDS_SHAKESPEARE=~/input.txt python scripts/prepare_data.py    # from a file that you have
    MANYHANDS_DATA=/shared/course python scripts/prepare_data.py        # into a folder that a class shares

You should see one line: where the file lies, or what the lessons will use instead.

    python scripts/prepare_data.py essays/ posts.jsonl.gz --to data/mine --vocab-size 4096      # a text of your own
    mpiexec -n 4 python scripts/prepare_data.py essays/ --to data/mine                          # the same bytes, sooner
    python -m torch.distributed.run --standalone --nproc-per-node 4 scripts/prepare_data.py essays/ --to data/mine
    python scripts/prepare_data.py essays/ --to data/mine --tokenizer SmolLM2-135M   # for train.py --from SmolLM2-135M
    python scripts/prepare_data.py --corpus plays --to data/plays   # all 38 plays, 4.8 MB of text, for larger models
    python scripts/prepare_data.py --verify data/mine           # read every byte: has one changed since?
    python scripts/train.py --data.folder data/mine

Files are plain text or JSON lines in UTF-8, each also as .gz; a folder stands for the text files below it. You should
see what was dropped and why, with an example of each, and how many tokens are left; report.json and report.png say it
again.

Status 2: a wrong file, a corrupt download or a full disk, with the cure. What was interrupted or killed is no prepared
text: start again. Two at once do not write into one FOLDER: the second ends.
"""

import shlex
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # it runs without an install

import manyhands.launch.entry as entry  # first: Ctrl-C in the imports below is a sentence
from manyhands.course.folders import named
from manyhands.data import plays, shakespeare
from manyhands.launch.flags import Flags
from manyhands.launch.program import end


def arguments_of(argv, error=None):
    """The flags as a Namespace. `error(sentence)` ends the program where they make no sense."""
    parser = Flags(description=__doc__)
    parser.error = error or parser.error
    parser.add_argument("files", nargs="*", help="text files and folders; none: fetch Shakespeare")
    parser.add_argument("--require", action="store_true", help="status 1 if there is no Shakespeare")
    own = parser.add_argument_group("a text of your own")
    own.add_argument(
        "--corpus",
        choices=("plays",),
        help="instead of files: all plays of Shakespeare, one document each; the two that lessons validate on validate",
    )
    own.add_argument("--to", type=Path, metavar="FOLDER", help="where it goes, such as data/mine")
    own.add_argument("--replace", action="store_true", help="write FOLDER anew if a text was prepared there")
    own.add_argument("--verify", type=Path, metavar="FOLDER", help="read a prepared text and check every byte")
    own.add_argument(
        "--tokenizer",
        default="bpe",
        help="bpe: byte-pair encoding; char; or the folder of a model, for its own",
    )
    own.add_argument("--vocab-size", type=int, help="size of the BPE's vocabulary, 257 or more (4096)")
    own.add_argument("--validation", type=float, default=0.1, help="share of the documents (0.1)")
    own.add_argument("--blank-lines", type=int, default=2, help="blank lines that end a document (2); 0: never")
    own.add_argument("--text-field", default="text", help="where JSON lines have their text (text)")
    own.add_argument("--near", type=float, default=0.8, help="similar documents are copies; 2: only equal ones (0.8)")
    own.add_argument("--min-characters", type=int, default=100, help="a shorter document is dropped (100)")
    own.add_argument("--min-letters", type=float, default=0.5, help="share of letters, blanks not counted (0.5)")
    own.add_argument("--max-repeated", type=float, default=0.3, help="share of repeated lines (0.3)")
    own.add_argument("--max-runs", type=float, default=0.2, help="share of runs of one character (0.2)")
    return parser.parse_args(argv)


def config_of(given):
    """The PrepareConfig of the flags. Raises Refused."""
    from manyhands.config.bounds import refuse_bounds
    from manyhands.data.documents import Quality
    from manyhands.data.preparation import PrepareConfig

    limits = Quality(given.min_characters, given.min_letters, given.max_repeated, given.max_runs)
    size = PrepareConfig.vocab_size if given.vocab_size is None else given.vocab_size
    held_out = tuple(map(file_of, plays.HELD_OUT)) if given.corpus else ()
    cut = given.validation, held_out, given.blank_lines, given.text_field
    config = PrepareConfig(given.tokenizer, size, *cut, given.near, limits)
    refuse_bounds(config)
    return config


def wrong_value(given):
    """What makes no sense in the flags: a sentence, or None."""
    prepares = given.files or given.corpus
    char = "a tokenizer of characters has a token for each character of the text"
    faults = {
        "--verify reads a prepared text and takes no files; leave them out": given.verify
        and (given.files or given.corpus),
        "--corpus plays is a text of its own; leave the files out": given.corpus and given.files,
        "--to FOLDER says where the prepared text goes; name one, such as data/mine": prepares and not given.to,
        "--to needs files to prepare; name some": given.to and not prepares,
        f"--vocab-size is for bpe; {char}": given.vocab_size is not None and given.tokenizer == "char",
        f"--tokenizer {given.tokenizer} is neither bpe nor char nor a folder with a tokenizer.json": given.tokenizer
        not in ("bpe", "char")
        and not Path(given.tokenizer, "tokenizer.json").is_file(),
        "--vocab-size is for bpe; a model's tokenizer has its own": given.vocab_size is not None
        and given.tokenizer not in ("bpe", "char"),
    }
    if sentence := next((sentence for sentence, wrong in faults.items() if wrong), None):
        return sentence
    try:
        for path in filter(None, [given.to, given.verify]):
            named(path)
        if prepares:
            config_of(given)
    except ValueError as error:
        return str(error)
    return None


def fetch_shakespeare(require):
    """The status, after one line that says where it lies."""
    content, why_not = shakespeare.find()
    if content is None:
        print(shakespeare.offline_notice(why_not))
        return int(require)
    cached = shakespeare.from_cache()
    path = cached[0] if cached else shakespeare.store(content)
    print(f"corpus: Shakespeare, {shakespeare.NUM_BYTES:,} characters, sha256 checked, in {path}")
    return 0


def prepare_plays(given):
    """All plays as a text of one's own, each a document: every rank makes the files for itself."""
    if (folder := plays.folder()) is None:
        _refuse(f"the plays are not installed; {plays.CURE}")
    with tempfile.TemporaryDirectory(prefix="manyhands-plays-") as texts:
        for name, text in plays.all_plays(folder).items():
            Path(texts, file_of(name)).write_text(text, "utf-8")
        given.files, given.blank_lines = [texts], 0
        return prepare(given)


def file_of(play):
    return f"{play.replace('/', '-')}.txt"


def prepare(given):
    """A text of one's own, on all ranks that were started."""
    from manyhands.data.preparation import prepare_text, shown_report
    from manyhands.launch.join import join, leave, refuse

    ranks = join(name="prepare_data", device="cpu", timeout_s=24 * 3600.0)  # rank 0 learns while others wait
    try:
        report = prepare_text(given.files, given.to, config_of(given), ranks, given.replace)
    except shakespeare.DataError as error:
        refuse(str(error))
    if ranks.rank == 0:
        print(shown_report(report))
        print(f"{given.to}: python scripts/train.py --data.folder {shlex.quote(str(given.to))}")
    leave()
    return 0


def main():
    given = arguments_of(sys.argv[1:], _refuse)
    if sentence := wrong_value(given):
        _refuse(sentence)
    if given.corpus:
        return prepare_plays(given)
    if given.files:
        return prepare(given)
    if given.verify:
        from manyhands.data.corpus import verify_text

        print(f"{given.verify}: {verify_text(given.verify):,} bytes of tokens are as they were written")
        return 0
    return fetch_shakespeare(given.require)


def _refuse(sentence):
    """End all ranks with status 2; the first one says why."""
    end(f"prepare_data.py: {sentence}", 2)


if __name__ == "__main__":
    entry.run_program("prepare_data.py", main)
