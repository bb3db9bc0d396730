"""The errors that a user can mend: one line each, naming the rule, the value that broke it and the remedy."""


class UserError(ValueError):
    """A request, file or machine does not fit; the command line prints the line and exits with 2."""


class ReadError(OSError):
    """The disk failed while a run was under way; what was generated until then is kept."""


def reason(error: BaseException) -> str:
    """What a library says is wrong, short enough to stand inside a line of ours."""
    return " ".join(str(error).split())[:160] or type(error).__name__
