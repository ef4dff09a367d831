"""Data: sources with random access, and an order that depends only on the seed and the step."""

from raytf.data.image_datasets import Images, load_images
from raytf.data.sources import (
    ArraySource,
    CsvSource,
    ImageFolderSource,
    MappingSource,
    NpzSource,
    ParquetSource,
    RayDataSource,
    Source,
    Spec,
    TFRecordSource,
)
from raytf.data.sources.arrays import hold_out

__all__ = [
    "ArraySource",
    "CsvSource",
    "ImageFolderSource",
    "Images",
    "MappingSource",
    "NpzSource",
    "ParquetSource",
    "RayDataSource",
    "Source",
    "Spec",
    "TFRecordSource",
    "hold_out",
    "load_images",
]
