"""Sources: records that can be read in any order, in memory or in files on local disk, S3 and GCS."""

from raytf.data.sources.arrays import ArraySource
from raytf.data.sources.base import Order, Source, Spec, fingerprint
from raytf.data.sources.images import ImageFolderSource
from raytf.data.sources.parquet import ParquetSource

__all__ = ["ArraySource", "ImageFolderSource", "Order", "ParquetSource", "Source", "Spec", "fingerprint"]
