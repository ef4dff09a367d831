"""The identity of a run and how a difference is shown."""

from raytf.config.identity import batch_identity, differences
from raytf.config.train_config import TrainConfig


def test_equal_identities_have_no_differences():
    config = TrainConfig.of(workers="1:4")
    assert differences(batch_identity(config, 100), batch_identity(config.replace(run="other"), 100)) == ""


def test_world_size_and_length_are_no_part_of_the_identity():
    before = batch_identity(TrainConfig.of(workers="1", epochs=1), 100)
    after = batch_identity(TrainConfig.of(workers="3:4", steps=9, keep=1, jit=False), 100)
    assert differences(before, after) == ""


def test_the_strategy_is_no_part_of_the_identity_and_16_bit_gradients_are():
    before = batch_identity(TrainConfig.of(workers="2"), 100)
    assert batch_identity(TrainConfig.of(strategy="mirrored", logical_devices=2, show_cluster=True), 100) == before
    compressed = batch_identity(TrainConfig.of(compress_gradients=True), 100)
    assert differences(before, compressed) == "--compress-gradients: nothing in storage, True now"


def test_differences_name_the_flag_and_both_values():
    before = batch_identity(TrainConfig.of(seed=1), 100)
    after = batch_identity(TrainConfig.of(seed=2, global_batch_size=64), 90)
    assert differences(before, after) == (
        "--global-batch-size: 128 in storage, 64 now; --seed: 1 in storage, 2 now; "
        "training records: 100 in storage, 90 now"
    )


def test_long_values_show_the_place_where_they_differ():
    text = differences({"model": "a" * 500 + "X" + "b" * 500}, {"model": "a" * 500 + "Y" + "b" * 500})
    assert "X" in text
    assert "Y" in text
    assert len(text) < 200


def test_a_missing_entry_is_nothing():
    assert differences({}, {"--seed": "1"}) == "--seed: nothing in storage, 1 now"
