"""How bytes go to a device: large copies at once or in chunks, small uploads as copies or through a block of memory.

Why: a device serves copies of one direction in the order in which they were queued, whatever stream they are of. So an
upload of a few numbers waits until all layers that were queued before it have arrived, unless these leave gaps between
chunks, or unless the upload is no copy: a kernel reads it from locked host memory. Neither was seen on every device,
so the first run on one decides (`copy_choice.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyPolicy:
    """One way; the default is what runs where nothing was measured."""

    chunk_bytes: int | None = None  # a larger copy is sent in pieces with a tiny kernel between them; None: at once
    stages_uploads: bool = False  # a kernel reads uploads from locked host memory


AT_ONCE = CopyPolicy()
