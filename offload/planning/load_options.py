"""Which models are loaded and how, checked before libraries are imported that take seconds.

What flags say are a `ModelChoice` and `ModelOptions`, with what is not known to be wrong only to
the command line. `LoadOptions` are both together, and hold: all that loads, plans or tunes takes
them. Invariant: nothing is fetched, no weight is read, and torch is not imported.
"""

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from offload.checkpoint.checkpoint import Checkpoint, ModelFiles
from offload.checkpoint.files import open_regular
from offload.datastore.store import read_store
from offload.declaration import check_values, options_of
from offload.errors import UserError, os_errors_as_user_error, require
from offload.machine import available_ram_bytes, library_bytes
from offload.options import ModelChoice, ModelOptions, PathLike
from offload.planning.draft_kinds import DraftSpec, check_draft, files_of, is_auto, models_to_read
from offload.planning.profile import parse_profile
from offload.planning.quantised_drafts import check_held
from offload.rank_roles import (
    PipelineOptions,
    Roles,
    cards_of,
    parse_pipeline,
    parse_roles,
    require_exact_rule,
    require_no_launcher,
    require_place,
    shared_by,
)
from offload.rules import check_lenience, drafting_of
from offload.trees.spec import TreeSpec, parse_match_length, parse_tree, tree_to_fill
from offload.units import ByteSize, format_bytes, parse_rate

Found = TypeVar("Found")
# Free memory that is left to other work on the machine: a quarter, 1 GiB at least where that is no
# more than half, and always what Python and its libraries take.
_RESERVE_SHARE = 0.25
_RESERVE_BYTES = 1 << 30


def check_device_name(name: object) -> None:
    """Raise `UserError` for what is the name of no device."""
    is_name = isinstance(name, str) and (
        re.fullmatch(r"auto|cpu|cuda(:\d+)?", name) is not None or bool(cards_of(name))
    )
    requirement = "`device` must be auto, cpu, cuda, cuda:N or, of several cards, cuda:N,M"
    require(is_name, requirement, repr(name), 'try `device="auto"`')


@dataclass(frozen=True)
class LoadOptions(ModelOptions, ModelChoice):
    """Both models, and how they are loaded. Raises `UserError` for what could never be."""

    @classmethod
    def from_options(cls, options: ModelOptions, **extra: Any) -> "LoadOptions":
        """Return these options, with `extra` in place of some. Raises `UserError`."""
        values = {
            field.name: getattr(options, field.name)
            for field in fields(cls)
            if hasattr(options, field.name)
        }
        return cls(**{**values, **extra})

    def __post_init__(self) -> None:
        self._take_draft_apart()
        drafting_of(self.rule)
        check_device_name(self.device)
        self._take_ranks_of_cards()
        roles = self.roles()
        is_text = isinstance(self.tree, str)
        require(is_text, "`tree` must be text", f"{self.tree!r:.80}", "such as 64x16")
        parse_tree(self.tree)
        check_lenience(self.lenience, self.rule)
        self._check_ranks(roles)
        check_values(self)
        self._check_guesses()
        is_plain = self.kv_dtype == "auto" or self.prompt_cache is None
        requirement = "`prompt_cache` keeps the keys and values of the model's own type"
        require(is_plain, requirement, f"`kv_dtype` {self.kv_dtype}", "leave one of them out")
        if self.profile is not None and not self.has_no_profile:
            parse_profile(Path(self.profile))
        check_held(self.draft, self.draft_dtype)
        check_draft(self.draft, self.ranks)
        self.tree_spec()
        if roles is not None and not roles.is_sharded:
            self.pipeline_roles()

    def _take_draft_apart(self) -> None:
        """Give each part of `draft` its option: `A+lookup+store:PATH` is one way to name three."""
        if self.draft is None:
            return
        spec = DraftSpec.parse(self.draft)
        parts: dict[str, Any] = {"draft": spec.draft}
        if spec.looks_up:
            require(self.lookup is not False, "`draft` lookup", "`lookup` off", "leave one out")
            parts["lookup"] = True
        if spec.store is not None:
            requirement = "a store is named once"
            require(self.datastore is None, requirement, f"{self.datastore}", "leave one out")
            parts["datastore"] = Path(spec.store)
        for name, value in parts.items():
            object.__setattr__(self, name, value)

    def _take_ranks_of_cards(self) -> None:
        """Let each of several cards be a rank; they share every layer unless `ranks` says otherwise."""
        if not self.cards:
            return
        require_no_launcher(self.device)
        if self.ranks is None:
            object.__setattr__(self, "ranks", "shards")

    @property
    def cards(self) -> tuple[str, ...]:
        """Return the device of each rank where `device` names several; else none."""
        return cards_of(self.device)

    def _check_ranks(self, roles: Roles | None) -> None:
        if roles is not None:
            require_exact_rule(roles, self.rule, self.lenience)
            is_free = self.profile is None or self.has_no_profile
            is_whole = self.experts != "demand"
            one_of_them = "leave one of them out"
            for holds, requirement, remedy in (
                (is_free, "`profile` works in one process alone", "leave it out"),
                (not self.invariant, "`invariant` is promised by one process", one_of_them),
                (
                    self.parallel == 1 or roles.is_sharded,
                    "stages write one text at a time, `parallel` must be 1",
                    "give `parallel` 1, or use `ranks` shards",
                ),
                (
                    not self.keeps_prompts,
                    "prompts are kept by one process alone",
                    one_of_them,
                ),
                (self.kv_dtype == "auto", "`kv_dtype` works in one process alone", one_of_them),
                (is_whole, "`experts` demand works in one process alone", one_of_them),
            ):
                require(holds, requirement, shared_by(self.device, self.ranks), remedy)
            self._check_pipeline(roles)
        is_idle = roles is None and self.pipeline is not None
        remedy = "give `ranks`, such as stages:0-1"
        require(not is_idle, "`pipeline` goes with `ranks`", "none", remedy)

    def _check_pipeline(self, roles: Roles) -> None:
        names = ("tree", "lookup", "ngram", "datastore")
        for name, value in ((name, getattr(self, name)) for name in names):
            is_left_out = roles.is_sharded or value in (None, "auto", "none", False)
            requirement = f"`{name}` is for one pass at a time, and stages run several"
            require(is_left_out, requirement, value, "leave it out, or use `ranks` shards")
        if self.pipeline is not None:
            remedy = "name ranks as stages:0-2,draft:3"
            require(not roles.is_sharded, "`pipeline` says how stages run", self.ranks, remedy)
            parse_pipeline(self.pipeline)

    def _check_guesses(self) -> None:
        for name in ("config", "profile", "ngram", "datastore", "prompt_cache"):
            path = getattr(self, name)
            is_path = path is None or (isinstance(path, str | os.PathLike) and path != "")
            require(is_path, f"`{name}` must be a path", repr(path), "leave it out to have none")
        parse_match_length(self.lookup_length)
        has_length = self.lookup_length != options_of(ModelOptions)["lookup_length"].default
        is_idle = has_length and self.lookup is False and self.datastore is None
        requirement = "`lookup_length` is of `lookup` and of `datastore`"
        require(not is_idle, requirement, "neither", "leave it out")
        if self.datastore is not None:
            read_store(self.datastore)
        if self.ngram is not None and self.ngram_is_store:
            read_store(self.ngram)
        elif self.ngram is not None:
            path = Path(self.ngram).expanduser()  # which is read seconds later
            with os_errors_as_user_error(f"cannot read {path}", "check the path"):
                open_regular(path).close()
        named = next(
            (name for name in ("lookup", "ngram", "datastore") if getattr(self, name)), None
        )
        requirement = f"`{named}` guesses for a tree"
        require(
            named is None or self.tree != "none",
            requirement,
            "`tree` none",
            "leave one of them out",
        )

    @property
    def has_no_profile(self) -> bool:
        """Return True if no profile is wanted, not even one that would be found."""
        return str(self.profile) == "none"

    @property
    def keeps_prompts(self) -> bool:
        """Return True if prompts that were read are kept for others that begin alike.

        By default ranks keep none.
        """
        usual = ("none",) if self.ranks is None else ("none", "auto")
        return self.prompt_cache_ram not in usual or self.prompt_cache is not None

    @property
    def prompt_cache_bytes(self) -> int | None:
        """Return the memory for prompts that were read; None is what layers leave."""
        if self.prompt_cache_ram in ("auto", "none"):
            return None if self.keeps_prompts else 0
        return ByteSize.parse(self.prompt_cache_ram, "`prompt_cache_ram`")

    @property
    def prompt_folder_bytes(self) -> int:
        """Return the size that the folder of prompts may have."""
        return ByteSize.parse(self.prompt_cache_size, "`prompt_cache_size`")

    @property
    def ram_bytes(self) -> int:
        """Return the bytes that this process may take: the cards of a machine share its memory."""
        all_bytes = self.machine_ram_bytes
        return all_bytes // len(self.cards) if self.cards else all_bytes

    @cached_property
    def machine_ram_bytes(self) -> int:
        """Return the allowed bytes; by default of those that are free when this is first asked for.

        So a run is planned with what it was checked with, before libraries took some of it.
        """
        if self.ram is not None:
            return ByteSize.parse(self.ram, "`ram`")
        free_bytes = available_ram_bytes()
        needed_bytes = library_bytes()
        least_bytes = max(needed_bytes, min(_RESERVE_BYTES, free_bytes // 2))
        left_bytes = free_bytes - max(int(_RESERVE_SHARE * free_bytes), least_bytes)
        if left_bytes <= 0:
            requirement = (
                f"Python and its libraries take some {format_bytes(needed_bytes)} of memory"
            )
            complaint = f"{requirement}, {format_bytes(free_bytes)} are free here"
            raise UserError(f"{complaint}: end other programs, or raise the container's limit")
        return left_bytes

    @property
    def ngram_is_store(self) -> bool:
        """Return True if `ngram` names a datastore, which is a folder, and no text to count."""
        return self.ngram is not None and os.path.isdir(os.path.expanduser(self.ngram))

    @property
    def limit_bytes_per_s(self) -> int | None:
        """Return the rate that the stream is slowed down to, for studies."""
        return parse_rate(self.link_limit, "`link_limit`")

    @property
    def has_draft(self) -> bool:
        return self.draft is not None

    @property
    def has_open_draft(self) -> bool:
        """Return True if trials shall find the draft."""
        return is_auto(self.draft)

    @property
    def models_to_read(self) -> list[PathLike]:
        """Return the models whose files are read, the target first; a self draft has its files."""
        return models_to_read(self.model, self.draft)

    def headers(self, read: Callable[[PathLike, PathLike | None], Found]) -> list[Found]:
        """Return the result of `read` for each of these by name, and by the config of a GGUF file.

        So `check_setup` reads them before torch is imported, as far as they lie here; `resolve`,
        which asks the hub for others; and what names the results of many texts.
        """
        configs = (self.config, None)
        return [
            read(name, config) for name, config in zip(self.models_to_read, configs, strict=False)
        ]

    def files_of(self, headers: Sequence[Checkpoint]) -> ModelFiles:
        """Return both models with these headers. Raises `UserError` for a draft not worth it."""
        return files_of(headers, self.draft, self.draft_dtype, self.ranks)

    def pipeline_roles(self) -> tuple[Roles, PipelineOptions]:
        """Return the roles and the pipeline of stages; rank 0 drafts where no rank is named.

        Raises `UserError` for speculation without a draft.
        """
        usual = "async" if self.has_draft and self.tree != "none" else "plain"
        roles = self.roles()
        pipeline = parse_pipeline(self.pipeline or usual)
        assert roles is not None, "there are ranks"
        requirement = f"`pipeline` {pipeline.mode} guesses with a draft"
        is_plain = not pipeline.speculates
        require(
            self.has_draft or is_plain, requirement, "none", "give `draft`, or `pipeline` plain"
        )
        requirement = f"`pipeline` {pipeline.mode} guesses"
        require(
            self.tree != "none" or is_plain, requirement, "`tree` none", "leave one of them out"
        )
        is_served = self.has_draft or roles.draft is None
        requirement = f"rank {roles.draft} of `ranks` drafts"
        require(is_served, requirement, "no draft", "give `draft`, or leave that rank out")
        return roles._replace(draft=(roles.draft or 0) if pipeline.speculates else None), pipeline

    def roles(self) -> Roles | None:
        """Return the roles of the processes started together; None for a single process."""
        if self.ranks is None:
            return None
        return parse_roles(self.ranks, len(self.cards) or require_place().num_ranks)

    @property
    def looks_up(self) -> bool:
        """Return True if the text's own past is searched for continuations.

        By default it is where there is no draft, or the tree may follow it.
        """
        is_free = self.tree == "auto" and not drafting_of(self.rule).keeps_distributions
        return (not self.has_draft or is_free) if self.lookup is None else self.lookup

    def tree_spec(self) -> TreeSpec:
        """Return the tree that is wanted. Raises `UserError` for one that nothing could fill."""
        has_sources = self.ngram is not None or self.datastore is not None or self.looks_up
        is_ranked = self.has_draft
        return tree_to_fill(self.tree, self.rule, is_ranked=is_ranked, has_sources=has_sources)

    def planned_tree(self, tokens_per_sweep: float | None) -> TreeSpec:
        """Return the tree to plan for, of which a sweep may be said to yield this many tokens.

        Raises `UserError` for a tree without a draft, and for a yield that belongs to no one tree.
        """
        tree = self.tree_spec()
        # what guesses yield depends on the text, and by themselves they take no extra room
        if not self.has_draft:
            is_left_out = tree.is_chosen or tree.kind == "none"
            requirement = "`tree` needs a `draft` to be planned for"
            require(is_left_out, requirement, repr(self.tree), "give `draft`, or leave `tree` out")
            tree = TreeSpec("none")
        if tokens_per_sweep is not None:
            if tree.is_chosen or tree.kind == "none":
                raise UserError(
                    f"`tokens_per_sweep` {tokens_per_sweep:g} belongs to one tree: name it, such as `tree` 128x20"
                )
            requirement = f"`tokens_per_sweep` must lie in 1 to {tree.depth + 1}"
            remedy = "a pass yields one token, and one more for each level at most"
            require(1 <= tokens_per_sweep <= tree.depth + 1, requirement, tokens_per_sweep, remedy)
        return tree
