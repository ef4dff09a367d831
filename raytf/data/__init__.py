"""Data: sources with random access, and an order that depends on the seed and the step alone."""

from raytf.data.datasets import Images, load_images
from raytf.data.sources import ArraySource, ImageFolderSource, ParquetSource, Source, Spec

__all__ = ["ArraySource", "ImageFolderSource", "Images", "ParquetSource", "Source", "Spec", "load_images"]
