"""Sources: records that can be read in any order, in memory or in files on local disk, S3, GCS and Azure."""

from raytf.data.sources.arrays import ArraySource
from raytf.data.sources.base import Order, Source, Spec, fingerprint
from raytf.data.sources.csv import CsvSource
from raytf.data.sources.images import ImageFolderSource
from raytf.data.sources.mapping import MappingSource
from raytf.data.sources.npz import NpzSource
from raytf.data.sources.parquet import ParquetSource
from raytf.data.sources.ray_dataset import RayDataSource
from raytf.data.sources.tfrecord import TFRecordSource

__all__ = [
    "ArraySource",
    "CsvSource",
    "ImageFolderSource",
    "MappingSource",
    "NpzSource",
    "Order",
    "ParquetSource",
    "RayDataSource",
    "Source",
    "Spec",
    "TFRecordSource",
    "fingerprint",
]
