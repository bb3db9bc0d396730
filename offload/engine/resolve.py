"""From options to a `Setup`: files, type, device, memory budget, tree, link, and how experts come.

`resolve` is the one way from what a user asks for to what will be loaded, and its code follows the
order of the decisions. A plan for another machine passes values in place of this one's.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from offload.calibration.rates import with_rates
from offload.checkpoint.checkpoint import Checkpoint, ModelFiles, settled_dtype
from offload.checkpoint.open import ReadHeaders, fetch, open_headers, other_weights
from offload.engine.hooks import NO_HOOKS, Hooks
from offload.engine.setup import Setup
from offload.engine.tokenizer import require_described_vocabulary
from offload.model.headers import describe, known_layers, specified
from offload.planning.budget import budget_of, ram_warning, require_no_states, with_experts
from offload.planning.draft_kinds import carried_kind
from offload.planning.hardware import Assumptions
from offload.planning.load_options import LoadOptions
from offload.streaming.device import HOST, Device, device_of
from offload.streaming.disk import DiskReader, OpenSource

_CARRIED = (
    "the files have layers that guess ahead: `draft` {} takes them, `draft` auto what is quickest"
)


def resolve(
    options: LoadOptions,
    *,
    device: Device | None = None,
    assumed: Assumptions | None = None,
    read: ReadHeaders | None = None,
    admit: Callable[[Setup], object] = Setup.admit,
    open_source: OpenSource = DiskReader,
    hooks: Hooks = NO_HOOKS,
) -> Setup:
    """Read headers, fetch what is missing, and decide all that does not need a loaded model.

    Args:
        device: an open device; None opens the one of `options`.
        assumed: a machine in place of this one; then nothing is fetched.
        read: returns headers by name and config; `check_setup` returns one that reads nothing
            twice, and a plan's reads a config without weights as well.
        admit: raises for models without room, before their weights are fetched.

    Raises `UserError` for models or memory that do not suffice.
    """
    device = device or device_of(options, assumed)
    hooks.on_phase("reading headers")
    headers = options.headers(read or (open_headers if assumed is None else describe))
    setup = resolve_files(_specified_files(options, headers), options, device, assumed)
    admit(setup)
    if assumed is None:
        fetched = fetch(options.models_to_read, headers, hooks.on_phase, hooks.on_bytes)
        # the hub may have another commit by now
        if fetched != headers:
            setup = resolve_files(_specified_files(options, fetched), options, device)
            admit(setup)
    else:
        require_described_vocabulary(setup.files)
    setup = replace(setup, open_source=open_source, hooks=hooks)
    if options.ranks is not None:
        # how experts come, and over which link, is settled once all ranks have met
        require_no_states(setup.files, setup.dtype)
        return setup
    budget = setup.budget
    if setup.hardware is None:
        budget = with_rates(
            budget,
            setup.files,
            setup.least_nodes,
            num_threads=options.threads,
            limit_bytes_per_s=options.limit_bytes_per_s,
            disk_bytes_per_s=setup.disk_bytes_per_s,
            open_source=open_source,
        )
    num_nodes = None if setup.tree.is_chosen else setup.tree.num_nodes
    return replace(setup, budget=with_experts(budget, setup.files, num_nodes=num_nodes))


def _specified_files(options: LoadOptions, headers: Sequence[Checkpoint]) -> ModelFiles:
    """Return both models with descriptions of their layers. Raises `UserError`."""
    models = [model for model in options.files_of(headers) if model is not None]
    return ModelFiles(*(known_layers(model) or specified(model) for model in models))


def resolve_files(
    files: ModelFiles,
    options: LoadOptions,
    device: Device = HOST,
    assumed: Assumptions | None = None,
) -> Setup:
    """Return the setup that headers alone decide. Raises `UserError` for options that do not fit."""
    hardware = assumed and assumed.hardware
    budget = budget_of(
        options, str(device.torch_device) if device.has_own_memory else None, hardware
    )
    dtype, notes = settled_dtype(files.target, options.dtype, is_on_cpu=budget.gpu_bytes is None)
    # a machine that is described has as much memory as is said
    if assumed is None or (assumed == Assumptions() and files.target.is_here):
        notes += filter(None, [ram_warning(budget.ram_bytes)])
    notes += filter(None, [other_weights(files.target)])
    carried = carried_kind(files.target)
    if carried is not None and options.draft is None and options.tree != "none":
        notes.append(_CARRIED.format(carried))
    return Setup(
        files=files,
        options=options,
        tree=options.tree_spec(),
        device=device,
        budget=replace(budget, dtype=dtype),
        notes=tuple(notes),
        assumed=assumed,
    )
