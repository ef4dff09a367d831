"""What `fit` takes as data, and one line for what it does not take."""

import numpy as np
import pytest

from raytf.data import ArraySource, CsvSource, MappingSource
from raytf.data.sources.ray_dataset import is_ray_dataset
from raytf.driver.inputs import RunData, source
from raytf.errors import DataError
from raytf.storage.storage import Storage


class Squares:
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return float(i), i * i


def test_sources_arrays_and_data_sets(tmp_path):
    mine = ArraySource(np.arange(3))
    found = RunData.of(mine, (np.arange(4), np.arange(4)), Squares()).sources(Storage(str(tmp_path)))
    assert found.train is mine
    assert (type(found.validation), found.validation.records) == (ArraySource, 4)
    assert (type(found.test), found.test.take(np.array([2]))[1].tolist()) == (MappingSource, [4])
    assert RunData.of(mine, None, None).sources(Storage(str(tmp_path))).validation is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("data", ["data/mnist", b"x", {"x": [1]}, [1, 2], np.zeros(3), 3, iter(()), ()])
def test_what_is_no_data(data):
    with pytest.raises(
        DataError, match=r"^train data is a \w+\. Expected a Source such as .*, a Ray Dataset, or batches \("
    ):
        source(data, "train")


def test_parts_that_number_their_labels_differently_are_refused(tmp_path):
    def animals(part, *labels, classes=None):
        path = tmp_path / f"{part}.csv"
        path.write_text("\n".join(["x,label", *(f"1,{label}" for label in labels)]))
        return CsvSource(str(path), classes=classes)

    train = animals("train", "bird", "cat", "dog")
    with pytest.raises(DataError, match=r"test\.csv: label 0 is 'cat' here, but is 'bird' in .*train\.csv\. Number"):
        RunData.of(train, None, animals("test", "cat", "dog"))
    test = animals("test", "cat", "dog", classes=train.classes)
    assert RunData.of(train, (np.zeros(2), np.arange(2)), test).parts["test"] is test


def test_a_ray_dataset_is_known_without_ray():
    class Dataset:
        pass

    assert not is_ray_dataset(Dataset())
    Dataset.__module__ = "ray.data.dataset"
    assert is_ray_dataset(Dataset())
    assert is_ray_dataset(type("MaterializedDataset", (Dataset,), {})())
    assert not is_ray_dataset((np.zeros(3),))
