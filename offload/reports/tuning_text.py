"""The texts that a pair of models is tuned with, which are looked at before torch is imported."""

from pathlib import Path

from offload.checkpoint.files import read_given
from offload.errors import UserError

_MAX_BYTES = 1 << 30


def read_text(path: Path) -> str:
    """Return the text of a file to tune with.

    Raises `UserError` where it is missing, empty or not UTF-8.
    """
    try:
        # models write \n alone
        text = read_given(path, _MAX_BYTES).decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise UserError(f"cannot read the text {path} ({error.strerror}): check the path") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"the text must be UTF-8, {path} is not at byte {error.start}: convert it first"
        ) from None
    if not text.strip():
        raise UserError(f"the text {path} is empty: give text of the kind that will be decoded")
    return text
