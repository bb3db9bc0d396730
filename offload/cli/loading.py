"""The models of a command: from what its flags name, by what headers show, to a decoder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from offload.checkpoint.files import cache_folder
from offload.cli.console import Console
from offload.cli.run_lines import detail_lines, draft_name, opening_lines
from offload.engine.hooks import Progress
from offload.options import ModelChoice, ModelOptions, TalkingModels
from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.checkpoint.open import ReadHeaders
    from offload.engine.decoder import Decoder
    from offload.engine.identities import Identities
    from offload.engine.request import Request
    from offload.planning.load_options import LoadOptions


@dataclass(frozen=True)
class Loading:
    """What is to be loaded, as the user names it."""

    options: "LoadOptions"
    is_packaged: bool = False  # the target is a small one, of which a large one is to be made
    read: "ReadHeaders | None" = None  # of `check_setup`
    note: str = ""  # for the user, about the sampling

    @classmethod
    def from_options(cls, models: ModelChoice, options: ModelOptions, **needs: bool) -> "Loading":
        """Return the models and options of flags. Raises `UserError` for misfits that headers show.

        `needs` are those of `check_setup`.
        """
        from offload.engine.precheck import check_setup
        from offload.planning.load_options import LoadOptions

        model, draft = models.names()
        checked = LoadOptions.from_options(options, model=model, draft=draft)
        read = check_setup(checked, **needs)
        return cls(checked, isinstance(models, TalkingModels) and models.demo, read)

    @property
    def model_name(self) -> str:
        """The last part of the model's name, and the head's where there are several ranks."""
        name = Path(self.options.model).absolute().name
        return name if self.options.ranks is None else f"{name} on rank 0"

    @property
    def config_place(self) -> str:
        """Where the files beside the weights are."""
        return str(self.options.config or self.options.model)

    def made(self, console: Console) -> "Loading":
        """Return this with the packaged target made large, where it is the one."""
        if not self.is_packaged:
            return self
        from offload.cli.packaged import packaged_chat

        with making_target(console) as landed:
            options = packaged_chat(self.options, landed)
        return replace(self, options=options, is_packaged=False)

    def identities(self) -> "Identities | None":
        """Return the models' names, before they are loaded; None where files must be fetched."""
        from offload.checkpoint.open import open_headers
        from offload.engine.identities import Identities

        files = self.options.files_of(self.options.headers(self.read or open_headers))
        if not all(checkpoint.is_here for checkpoint in files if checkpoint):
            return None
        return Identities(files, limit_bytes_per_s=self.options.limit_bytes_per_s)

    @contextmanager
    def open(
        self,
        console: Console,
        request: "Request",
        *,
        tells_tree: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> Iterator["Decoder"]:
        """Load the models with progress, and print what runs. Raises as `offload.load` does.

        Args:
            request: the first one.
            tells_tree: the tree of the first request is that of all.
            check: called where a layer has run; what it raises ends the run.
        """
        from offload.engine.load import open_decoder
        from offload.planning.budget import ram_warning

        def on_layer() -> None:
            console.layer_done()
            check()

        # before anything is loaded: where memory runs out, the system ends the process
        ram = self.options.ram
        console.say(ram_warning(ram) or "" if ram is not None else "")
        hooks = console.hooks._replace(on_layer=on_layer)
        with open_decoder(self.options, request, read=self.read, hooks=hooks) as decoder:
            console.clear()
            choice = decoder.tree_choice(request.sampling) if tells_tree else None
            draft = draft_name(self.options.draft)
            layout = {"is_decimal": console.is_decimal}
            console.say(opening_lines(self.model_name, draft, decoder, choice, **layout))
            console.detail(detail_lines(decoder, choice if draft else None))
            console.say(self.note)
            yield decoder


@contextmanager
def making_target(console: Console) -> Iterator[Progress]:
    """Yield a callback that shows the making of a packaged target; say that a made one is kept."""
    made_bytes = 0

    def landed(done_bytes: int, total_bytes: int) -> None:
        nonlocal made_bytes
        made_bytes = total_bytes
        console.bytes_landed(done_bytes, total_bytes, label="making the target")

    yield landed
    if made_bytes:
        size = format_bytes(made_bytes, is_decimal=True)
        console.say(f"made the packaged model: {size}, which stay in {cache_folder()}")
