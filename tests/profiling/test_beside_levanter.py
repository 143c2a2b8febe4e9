import equinox as eqx
import jax
import pytest
import yaml
from beside_levanter import build_parser, levanter_model
from haliax import Axis
from reported import reported
from tiny_run import DEMO, ONE_LAYER

from tomat.base.errors import TomatError
from tomat.model.decoder import parameter_count
from tomat.train.settings.config import load_config


@pytest.mark.slow
def test_both_take_steps_and_learn(tmp_path, capsys):
    words = [*ONE_LAYER, "--data.patches_per_material", "4", "--trainer.train_batch_size", "4"]
    config = load_config(DEMO, words).to_dict()
    config["optimizer"] = {"type": "adam", "learning_rate": 1e-2, "warmup": 0}  # Muon takes longer to compile
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(config))
    report = reported(tmp_path, "--config_path", path, "--rounds", 1, "--steps", 4, parser=build_parser())
    times = report["times_levanter"]
    assert 0 < times["min"] <= times["median"] <= times["max"] and report["tomat_tokens_per_s"]["min"] > 0
    for side in ("tomat", "levanter"):
        first, last = report[f"{side}_first_and_last_loss"]
        assert last < first
    assert "Levanter" in capsys.readouterr().out


def test_it_is_the_same_decoder_and_what_has_no_counterpart_is_refused():
    config = load_config(DEMO, ["--model.environment", "null", "--density_dropout", "0"])
    theirs, rows = levanter_model(config), config.data.model_vocabulary
    built = eqx.filter_eval_shape(lambda: theirs.build(Axis("vocab", rows), key=jax.random.PRNGKey(0)))
    arrays = [leaf for leaf in jax.tree.leaves(built) if isinstance(leaf, jax.ShapeDtypeStruct)]
    assert sum(leaf.size for leaf in arrays) == parameter_count(config.model_config(), rows)
    assert theirs.max_seq_len == 512 and theirs.tie_word_embeddings and theirs.use_qk_norm
    for words in (
        ["--model.embedding_skip", "0.1"],
        ["--model.int8_matmuls", "forward"],
        ["--model.value_mix", "0.1", "--model.num_layers", "2"],
        ["--model.paired_heads", "true"],
    ):
        with pytest.raises(TomatError, match=f"{words[0][2:]}: there is no counterpart in Levanter"):
            levanter_model(load_config(DEMO, words))
