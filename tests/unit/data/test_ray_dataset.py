"""Ray Datasets as files: what lies in the folder already. Real Datasets train in tests/ray/test_data.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from raytf.data import ArraySource, RayDataSource
from raytf.data.sources.schema import SCHEMA, UNFINISHED
from raytf.data.sources.writer import FileLayout, open_folder, write
from raytf.errors import ConfigError
from raytf.storage.storage import Storage


class Records:
    """What is asked of a ray.data.Dataset, without a cluster: eight records."""

    def __init__(self, fails=False):
        self.fails = fails
        self.context = SimpleNamespace(execution_options=SimpleNamespace(preserve_order=False))

    def schema(self):
        return SimpleNamespace(names=["x", "label"], types=["float", "int64"])

    def iter_batches(self, batch_size, batch_format):
        yield {"x": np.ones((8, 2), np.float32), "label": np.arange(8)}
        if self.fails:
            raise OSError("the node is gone")


def test_a_conversion_that_has_not_ended_is_kept(tmp_path):
    """Of other records: the folder was meant for it."""
    other, layout = ArraySource(np.arange(9)), FileLayout("parquet", 3, 3)
    folder = open_folder(Storage(str(tmp_path)), other, layout, "me")
    folder.begin()
    folder.write(layout.name(0), [other.take(np.arange(3))])
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == {layout.name(0), UNFINISHED}
    with pytest.raises(ConfigError, match="an unfinished conversion of other records") as error:
        RayDataSource(Records(), str(tmp_path))
    assert "Choose another folder, or delete this one" in str(error.value)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert write(Storage(str(tmp_path)), other, layout, "me")


def test_its_own_that_has_not_ended_is_written_anew(tmp_path):
    with pytest.raises(Exception, match="the node is gone"):
        RayDataSource(Records(fails=True), str(tmp_path))
    assert (tmp_path / UNFINISHED).exists()
    (tmp_path / "part-00007.parquet").write_text("left")
    said: list[str] = []
    source = RayDataSource(Records(), str(tmp_path), say=said.append)
    assert (source.records, source.take(np.arange(8))[1].tolist()) == (8, list(range(8)))
    assert {path.name for path in tmp_path.iterdir()} == {"part-00000.parquet", SCHEMA}
    assert RayDataSource(Records(fails=True), str(tmp_path), say=said.append).records == 8
    assert ["is written once to" in said[0], "written to" in said[1]] == [True, True]
