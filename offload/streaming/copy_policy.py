"""How bytes go to a device: large copies at once or in chunks, small uploads as copies or through a block of memory.

A device serves copies of one direction in their order, whatever stream they are of. So an upload of a few numbers waits
for all layers queued before it, unless these leave gaps, or a kernel reads it from locked host memory instead. Neither
helps on every device, so the first run on one decides (`copy_choice.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CopyPolicy:
    """One way; the default is what runs where nothing was measured."""

    chunk_bytes: int | None = None  # a larger copy is sent in pieces with a tiny kernel between them; None: at once
    stages_uploads: bool = False  # a kernel reads uploads from locked host memory


AT_ONCE = CopyPolicy()
