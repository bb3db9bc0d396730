"""From a `Setup` to a decoder, step by step: build, check, read, try out, plan, start.

What can be refused is refused before the first weight is read. If a step fails, what earlier steps
opened is closed again.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

from offload.calibration.invariance import prepare_invariance, settle_invariance
from offload.calibration.startup import pick_kernels
from offload.calibration.threads import thread_policy
from offload.checkpoint.files import counter
from offload.drafting.registry import proposer_of
from offload.drafting.retrieval import open_sources
from offload.engine.build import (
    ModelPair,
    layer_callback,
    open_pair,
    read_pair,
    send_beside_layers,
)
from offload.engine.decoder import Decoder
from offload.engine.decoder_config import DecoderConfig, PromptPlace
from offload.engine.expert_pools import open_draft_experts, open_experts
from offload.engine.request import Request
from offload.engine.run_trees import RunTrees
from offload.engine.setup import Setup
from offload.engine.team import LOADERS, Team, beside_cards
from offload.streaming.layers import open_layers


def open_setup(setup: Setup, request: Request | None = None, transport: Any = None) -> Decoder:
    """Build, read and calibrate the models of a setup. Raises as `load` does."""
    roles = setup.options.roles()
    with setup.device.computing(), ExitStack() as resources:
        if roles is None:
            return open_with(Team(), setup, request or Request(), resources)
        load = LOADERS["shards" if roles.is_sharded else "stages"]
        with beside_cards(setup, resources, transport):
            return load(setup, request or Request(), resources, transport)


def open_with(team: Team, setup: Setup, request: Request, resources: ExitStack) -> Decoder:
    """Open the decoder of this process in a team; it takes over `resources`."""
    setup = team.local_setup(setup)
    trees = RunTrees.from_setup(setup, request.sampling, team.exchange_s)
    setup.hooks.on_phase("building the models")
    # if all weights are read, they are summed up on the way
    is_summed = request.is_for_file and team.is_alone and not setup.minimal_plan.has_experts
    pair = open_pair(setup, request, resources, team.adapt, is_summed=is_summed)
    prepare_invariance(
        pair.target, setup.options, setup.minimal_plan, device=setup.device, is_alone=team.is_alone
    )
    config = _measure(pair, trees, team, resources)
    plan = config.plan
    setup.hooks.on_phase("reading layers that stay")
    # samples of layers for trials and timing, kept outside the plan
    for model in filter(None, (pair.target, pair.draft)):
        model.drop_experts()
    pair.scans[0].expect(pair.target.layer_layouts, plan.tier_L)
    layouts = [*pair.target.layer_layouts, *pair.target.encoder_layouts]
    layers = open_layers(pair.source, layouts, plan, setup.device, resources)
    staying_bytes = sum(layouts[layer].slab_bytes for layer in layers.carrier.loaded)
    layers.load_resident(counter(staying_bytes, setup.hooks.on_bytes))
    target = team.target(
        pair.target,
        layers,
        plan,
        kernels=config.choice.kernels,
        on_layer=layer_callback(pair),
        experts=open_experts(pair, config, trees, resources),
        device=setup.device,
    )
    open_draft_experts(pair, plan, resources)
    pair.notes.extend([*setup.notes, *team.notes])
    drafter = proposer_of(
        pair.draft,
        pair.target.vocab_size,
        plan.draft_slots if pair.scout is None else plan.tier_slots,
        config.choice.kernels,
        config.sources,
        config.trees.step_s,
        scout=pair.scout,
    )
    return Decoder(target, drafter, config, resources=resources.pop_all(), notes=pair.notes)


def _measure(pair: ModelPair, trees: RunTrees, team: Team, resources: ExitStack) -> DecoderConfig:
    """Read embeddings and head, calibrate products and threads, choose and plan the tree."""
    setup = pair.setup
    options = setup.options
    hooks = setup.hooks
    target = pair.target
    draft = pair.draft
    least = setup.minimal_plan
    sources = open_sources(options, pair.tokenizer, target.vocab_size)
    most = setup.plan_for(trees.most_nodes)
    # for the largest trees: layers for which only these leave no room then stream with them
    if most.is_streamed:
        pair.notes.extend(send_beside_layers(setup.device, resources, target, draft, pair.scout))

    # the first weights are read here: everything that can be refused was
    hooks.on_phase("reading embeddings" if draft is None else "reading draft and embeddings")
    trials = [trial for expansion in read_pair(pair) for trial in expansion.comparisons]
    hooks.on_phase("choosing kernels and threads")
    choice = pick_kernels(target, draft, setup.device, most, trees.settings)
    pair.notes.extend(choice.notes)
    threads = thread_policy(target, draft, setup.tree.num_nodes, options.threads, setup.device)

    same_bits = partial(settle_invariance, target, pair.source.fetch, options, threads)
    invariance = same_bits(least, hooks.on_phase, device=setup.device, is_alone=team.is_alone)
    measuring = "measuring how fast layers come, choosing a tree"
    hooks.on_phase(measuring if setup.tree.is_chosen else "planning memory")
    fetch = pair.source.fetch
    trees = trees.calibrated(target, draft, fetch, threads=threads, choice=choice)
    plan, selector = trees.plan()
    if plan.is_streamed and not least.is_streamed:
        invariance = same_bits(plan, hooks.on_phase, device=setup.device, is_alone=team.is_alone)
    pair.notes.extend(invariance.notes)
    team.tell_plan(plan)
    return DecoderConfig(
        plan=plan,
        identities=pair.identities,
        trees=selector,
        rule=options.rule,
        lenience=options.lenience,
        threads=threads,
        choice=choice._replace(comparisons=(*choice.comparisons, *trials)),
        tokenizer=pair.tokenizer,
        invariance=invariance,
        sources=sources,
        prompts=PromptPlace.from_setup(setup, pair.notes),
        texts=pair.texts,
    )
