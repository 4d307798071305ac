"""Options: presets, files and flags, which of them wins, and what is refused."""

import json

import pytest
from manyhands.config.options import (
    PRESETS,
    OptionError,
    Options,
    from_preset,
    merged,
    model_config,
    read_options,
    to_dict,
)
from manyhands.config.strategies import STRATEGIES
from manyhands.launch.program import Refused


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def refused(argv):
    with pytest.raises(Refused) as error:
        read_options(argv)
    return str(error.value)


def test_without_flags_the_preset_is_nano_and_nano_is_the_lessons_model():
    options = read_options([])
    assert options == Options(preset="nano")
    assert (options.model.n_layer, options.model.n_head, options.model.n_embd) == (4, 4, 128)
    assert model_config(options, 65).num_params() == 816_705  # ShakespeareGPT, as lesson 01 counts it


def test_flags_win_over_the_file_and_the_file_wins_over_the_preset(write):
    path = write("run.toml", "[train]\nsteps = 77\nglobal-batch = 16\n")
    preset = from_preset("shakespeare")
    assert (preset.train.steps, preset.train.global_batch, preset.model.n_layer) == (5000, 64, 6)
    options = read_options(["--preset", "shakespeare", "--config", path, "--train.steps", "5"])
    assert (options.train.steps, options.train.global_batch, options.model.n_layer) == (5, 16, 6)


def test_a_flag_that_is_given_twice_has_its_last_value(write):
    """A job file writes its own flags first, then those of the one who submits it."""
    options = read_options(["--preset", "gpt2", "--preset", "shakespeare"])
    assert (options.preset, options.model.n_embd) == ("shakespeare", 384)


def test_a_file_may_name_the_preset_and_a_flag_may_name_another(write):
    path = write("run.toml", 'preset = "gpt2"\n[train]\nsteps = 7\n')
    options = read_options(["--config", path])
    assert (options.preset, options.model.n_embd, options.train.steps) == ("gpt2", 768, 7)
    for preset, width in (("gpt2-medium", 1024), ("nano", 128)):
        options = read_options(["--config", path, "--preset", preset])
        assert (options.preset, options.model.n_embd, options.train.steps) == (preset, width, 7)


def test_what_a_checkpoint_writes_down_of_the_options_is_read_back():
    options = read_options(["--preset", "gpt2", "--parallel.tensor", "2", "--checkpoint.folder", "x"])
    assert merged(Options(), json.loads(json.dumps(to_dict(options))), "manifest.json") == options


@pytest.mark.parametrize(
    "preset, num_params",
    [
        ("nano", 816_705),
        # 6 (12 x 384^2 + 10 x 384) + 384 (65 + 256) + 2 x 384 + 65 x 385
        ("shakespeare", 10_788_929),
        ("shakespeare-moe", 4_488_257),  # nano's 816,705 + 4 (8 x 128 + 64 x 128^2 - 8 x 128^2 - 5 x 128)
        ("shakespeare-85m", 85_914_689),  # 12 (12 x 768^2 + 10 x 768) + 768 (65 + 1024) + 2 x 768 + 65 x 769
        ("gpt2", 124_439_808),  # as the published weights
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("gpt-1b", 941_346_148),
        ("gpt-7b", 6_715_153_764),
        ("llama-nano", 742_784),  # 4 (2 x 128^2 + 2 x 128 x 64 + 3 x 128 x 344 + 2 x 128) + 2 x 65 x 128 + 128
        ("smollm2-135m", 134_515_008),  # as the published weights
        ("llama3.2-1b", 1_235_814_400),
        ("llama3-8b", 8_030_261_248),
        ("olmo-1b", 1_176_764_416),
        ("olmo-7b", 6_888_095_744),
    ],
)
def test_each_preset_has_the_size_that_its_name_says(preset, num_params):
    options = read_options(["--preset", preset])
    assert model_config(options, 65).num_params() == num_params


def test_an_unknown_preset_is_refused_with_the_known_ones():
    sentence = refused(["--preset", "gpt5"])
    assert "'gpt5' is unknown" in sentence and all(preset in sentence for preset in PRESETS)


@pytest.mark.parametrize(
    "text, words",
    [
        ("[train]\nstepz = 3\n", ("run.toml: train", "'stepz' is not an option", "global_batch")),
        ("train = 3\n", ("run.toml: train is a group",)),
        ("[train]\nsteps = '3'\n", ("run.toml: train: steps='3' is not an int",)),
        ("[train]\ncompile = 1\n", ("run.toml: train: compile=1 is not a bool",)),
        ("[parallel]\nstrategy = 'magic'\n", ("strategy='magic'", f"use one of {', '.join(STRATEGIES)}")),
        ("preset = 'gpt5'\n", ("preset 'gpt5' is unknown", "nano")),
        ("[train\n", ("run.toml cannot be used (",)),
    ],
)
def test_a_file_with_a_wrong_key_or_type_is_refused_with_its_place(write, text, words):
    sentence = refused(["--config", write("run.toml", text)])
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--train.steps 0", ("train.steps=0", "at least 1")),
        ("--optimizer.lr nan", ("optimizer.lr=nan is not finite",)),
        ("--optimizer.weight-decay 2000", ("weight_decay=2000", "lr=0.001", "is 2", "a smaller weight_decay")),
        ("--optimizer.min-lr 1", ("optimizer.min_lr=1, for the end of the run, is more than optimizer.lr=0.001",)),
        ("--optimizer.beta1 1.0", ("optimizer.beta1=1.0 is too large; use less than 1",)),
        ("--train.timeout-s 0", ("train.timeout_s=0.0 is too small; use more than 0",)),
        ("--train.seed 9223372036854775808", ("train.seed=9223372036854775808 is too large; use at most 92",)),
        ("--ranks 8", ("ranks=8", "--dry-run")),
        ("--log.prompt=", ("log.prompt is empty", "log.sample=0")),
        ("--model.n-head 3", ("model.n_embd=128 does not split over 3 heads", "multiple of 3")),
        ("--model.dropout 1", ("model.dropout=1.0",)),
        ("--model.n-kv-head 2", ("model.n_kv_head=2 is for style=llama",)),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_with_its_number(flags, words):
    sentence = refused(flags.split())
    assert all(word in sentence for word in words), sentence


def test_a_warm_up_that_does_not_end_before_the_run_is_refused_with_both_numbers():
    """515 steps with 1,000 of warm-up never reached their peak."""
    sentence = refused(["--train.steps", "515", "--optimizer.warmup", "1000"])
    assert "1000" in sentence and "515" in sentence and "peak" in sentence
    assert "warmup=515" in refused(["--train.steps", "515", "--optimizer.warmup", "515"])
    assert read_options(["--train.steps", "515", "--optimizer.warmup", "514"]).optimizer.warmup == 514


def test_a_corpus_with_more_tokens_than_the_vocabulary_is_refused_with_both():
    options = read_options(["--model.vocab-size", "64"])
    with pytest.raises(OptionError, match="vocab_size=64.* 65 tokens"):
        model_config(options, 65)
    assert model_config(options, 64).vocab_size == 64
    assert model_config(read_options([]), 65).vocab_size == 65


@pytest.mark.parametrize("flags", ["--train.steps many", "--train.stepz 3", "--parallel.strategy magic"])
def test_a_flag_of_a_wrong_type_or_name_is_refused_by_name(flags):
    with pytest.raises(Refused, match=flags.split()[0]):
        read_options(flags.split())


@pytest.mark.filterwarnings("ignore:get_parser")
def test_every_option_says_what_it_is():
    import tyro

    help_of = {action.option_strings[0]: action.help for action in tyro.extras.get_parser(Options)._actions}
    assert len(help_of) > 50
    assert [flag for flag, text in help_of.items() if not text or text.startswith("(default")] == []


def test_help_lists_every_group_with_its_defaults(capsys):
    with pytest.raises(SystemExit) as ended:
        read_options(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"--{flag}" in shown for flag in ("model.n-layer", "train.steps", "parallel.strategy", "preset"))
    assert all(f"{name:<11}{one.help}" in shown for name, one in STRATEGIES.items())


@pytest.mark.parametrize("flag", ["--checkpoint.folder=", "--config=", "--log.wandb=", "--checkpoint.folder= "])
def test_an_empty_value_is_refused_and_does_not_mean_none(flag):
    """--checkpoint.folder="$UNSET" would train for hours into a folder that nobody resumes from."""
    assert "is empty (is a variable of the shell unset?)" in refused([flag])


def test_a_tilde_is_the_home_folder_also_where_no_shell_reads_it(monkeypatch, tmp_path, write):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("run.toml", "[train]\nsteps = 7\n")
    options = read_options(["--checkpoint.folder=~/mine", "--config=~/run.toml"])
    assert options.checkpoint.folder == str(tmp_path / "mine") and options.train.steps == 7
