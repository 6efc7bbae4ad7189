"""Data sets: their layout and canonical form, checks, and the tables that they come from."""

from warpfit.dataset.canonical import (
    ClientDataset,
    Dataset,
    DatasetReference,
    PayloadDigest,
    ServerFile,
    blocks_of,
    client_dataset,
)
from warpfit.dataset.layout import (
    DTYPE_CODES,
    DTYPES,
    Layout,
    PrecisionWarning,
    RoundingCheck,
    check_weights,
    warn_of_lost_digits,
)
from warpfit.dataset.tables import ParquetColumns, Table, changed_data, open_table
