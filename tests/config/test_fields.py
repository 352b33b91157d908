"""Settings that follow from others are computed on each use, so `replace` leaves no stale value."""

from dataclasses import replace

from posbench import compose
from posbench.config import Config, EvaluationConfig, TrainConfig, parse_length
from posbench.runs.fingerprints import identity
from tests.refusals import refuses

DEVICE = {"type": "cpu", "dtype": "float32", "compiled": False}


def test_the_learning_rate_of_a_scheme_is_looked_up():
    config = compose(["scheme=vo_rope", "train.lr=1e-3", "train.lr_of={vo_rope:5e-3}"])
    assert config.train.lr == config.scheme.lr == 5e-3
    other = compose(["scheme=nope", "train.lr=1e-3", "train.lr_of={vo_rope:5e-3}"])
    assert other.train.lr == 1e-3 and other.scheme.lr is None
    assert compose(["scheme=vo_rope", "scheme.lr=7e-3", "train.lr_of={vo_rope:5e-3}"]).train.lr == 7e-3
    assert Config.from_mapping(config.to_mapping()) == config


def test_a_rate_in_words_goes_before_those_of_an_experiments_file():
    words = ["experiment=headline", "scheme=vo_rope"]
    assert compose(words).train.lr == 1e-3 and compose([*words, "train.lr=5e-3"]).train.lr == 5e-3
    assert compose([*words, "train.lr=5e-3", "train.lr_of={nope:7e-3,mine:1e-4}"]).train.lr_of["mine"] == 1e-4


def test_a_run_is_identified_by_what_its_settings_came_to():
    config = compose(["model=tiny", "train.lr_of={qk_rope:5e-3}"])
    model, spelled_out = config.model, config.to_mapping()
    spelled_out["model"] |= {"num_kv_heads": 2, "head_dim": model.head_width, "ffn_dim": model.ffn_width}
    spelled_out["scheme"]["lr"] = 5e-3  # as older runs recorded it
    assert identity(Config.from_mapping(spelled_out), DEVICE) == identity(config, DEVICE)
    assert identity(config, DEVICE)["train.lr"] == 5e-3 and identity(config, DEVICE)["scheme.own_lr"]
    assert identity(config, DEVICE)["model.num_kv_heads"] == 2


def test_steps_and_tokens_count_a_thousand_and_lengths_1024():
    train = TrainConfig(steps="2k", batch_size=2, context_length=8, lr=1e-3, checkpoint_every="1k", log_every="0.5k")
    assert (train.steps, train.checkpoint_every, train.log_every) == (2000, 1000, 500)
    assert (parse_length("length", "2k"), EvaluationConfig(piece="1k").piece) == (2048, 1024)
    refuses(r"train\.steps='many' is not a number of steps", replace, train, steps="many")
    refuses(r"train\.log_every=0 is out of range: it must be 1 or more", replace, train, log_every=0)
