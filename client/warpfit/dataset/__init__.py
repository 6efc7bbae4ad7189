"""Data sets: their layout and canonical form, checks, and the tables that they come from."""

from warpfit.dataset.canonical import (
    ClientDataset,
    Dataset,
    DatasetReference,
    PayloadDigest,
    client_dataset,
)
from warpfit.dataset.checks import PrecisionWarning, check_weights
from warpfit.dataset.layout import DTYPE_CODES, DTYPES, Layout
from warpfit.dataset.sources import changed_data
from warpfit.dataset.tables import open_table

__all__ = [
    "DTYPES",
    "DTYPE_CODES",
    "ClientDataset",
    "Dataset",
    "DatasetReference",
    "Layout",
    "PayloadDigest",
    "PrecisionWarning",
    "changed_data",
    "check_weights",
    "client_dataset",
    "open_table",
]
