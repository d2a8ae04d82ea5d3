"""Text in, rows of token ids out: sources and mixtures, hold-out, packing, the training stream, sampled text.

A row is `context` token ids with positions that restart at 0 wherever a new document begins, so that no stage has to
guess where one document ends and the next starts.
"""

from linearize.data.holdout import split_documents
from linearize.data.loader import Batch, Loader
from linearize.data.rows import Rows, content_hash, followed, moved, pack_rows
from linearize.data.sampling import sample_text, self_text
from linearize.data.sources import (
    RowSource,
    Source,
    bundled_documents,
    check_sources,
    documents,
    open_sources,
    parse_sources,
    read_documents,
)

__all__ = [
    "Batch",
    "Loader",
    "RowSource",
    "Rows",
    "Source",
    "bundled_documents",
    "check_sources",
    "content_hash",
    "documents",
    "followed",
    "moved",
    "open_sources",
    "pack_rows",
    "parse_sources",
    "read_documents",
    "sample_text",
    "self_text",
    "split_documents",
]
