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
from warpfit.dataset.tables import (
    DTYPE_CODES,
    DTYPES,
    Layout,
    ParquetColumns,
    PrecisionWarning,
    RoundingCheck,
    Table,
    changed_data,
    check_weights,
    open_table,
    warn_of_lost_digits,
)
