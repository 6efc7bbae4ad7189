"""Data sets: their layout and canonical form, checks, and the tables that they come from."""

from warpfit.dataset.arrow import ParquetColumns
from warpfit.dataset.canonical import (
    ClientDataset,
    Dataset,
    DatasetReference,
    PayloadDigest,
    ServerFile,
    blocks_of,
    client_dataset,
)
from warpfit.dataset.checks import (
    PrecisionWarning,
    RoundingCheck,
    check_weights,
    warn_of_lost_digits,
)
from warpfit.dataset.layout import DTYPE_CODES, DTYPES, Layout
from warpfit.dataset.sources import changed_data
from warpfit.dataset.tables import Table, open_table
