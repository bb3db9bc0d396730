"""The commands that write text: `generate` and `chat`."""

from typing import Annotated

import typer

from offload.cli import flags
from offload.cli.app import app
from offload.cli.console import Console
from offload.cli.grammar_choice import own_grammar
from offload.cli.libraries import libraries
from offload.cli.many_texts import ManyWishes, write_many
from offload.cli.prompt_input import read_prompt, with_system
from offload.cli.rank_process import is_worker
from offload.cli.sampling_choice import choose_sampling, own_sampling
from offload.cli.session_file import found_session
from offload.units import require


@app.command(
    epilog="""Examples:

    offload generate -m Llama-3.1-70B -d Llama-3.2-1B --ram 32GiB -p "Once upon a time"

    cat notes.txt | offload generate -m big -d small --temp 0.6 --seed 7 --tree dynamic:128x20

    offload generate -m big --datastore code.store -f main.py    # no draft: what code and the text itself say

    offload generate -m big -d small -f prompt.txt --json > result.json

    offload generate -m big -d small -f prompts.jsonl --out results.jsonl    # many prompts; again goes on with them

    offload generate -m big -d small -p "Tell a joke." --temp 0.8 --samples 4"""
)
def generate(
    model: flags.Model,
    draft: flags.Draft = None,
    config: flags.Config = None,
    prompt: flags.Prompt = None,
    file: flags.PromptFile = None,
    system: flags.System = None,
    max_tokens: flags.NumTokens = 128,
    temp: flags.OwnTemp = None,
    top_p: flags.OwnTopP = None,
    top_k: flags.OwnTopK = None,
    min_p: flags.OwnMinP = None,
    greedy: flags.Greedy = False,
    seed: flags.Seed = 0,
    repeat_penalty: flags.RepeatPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    stop: flags.Stop = None,
    json_schema: flags.JsonSchema = None,
    regex: flags.Regex = None,
    grammar: flags.LarkGrammar = None,
    session: flags.Session = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    draft_dtype: flags.DraftDtype = None,
    experts: flags.Experts = "auto",
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    lenience: flags.Lenience = 1.0,
    lookup: flags.Lookup = None,
    lookup_length: flags.LookupLength = "1:16",
    ngram: flags.Ngram = None,
    datastore: flags.Datastore = None,
    threads: flags.Threads = None,
    profile: flags.ProfileFile = None,
    invariant: flags.Invariant = None,
    link_limit: flags.LinkLimit = None,
    ranks: flags.Ranks = None,
    pipeline: flags.Pipeline = None,
    slow_layer: flags.SlowLayer = 0.0,
    raw: Annotated[bool, typer.Option("--raw", help="no chat template")] = False,
    as_json: flags.Json = False,
    logprobs: flags.Logprobs = None,
    samples: flags.Samples = 1,
    out: flags.Results = None,
    parallel: flags.Parallel = 1,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Write text with a model larger than memory."""
    many = ManyWishes.of(prompt, file, out, samples, session, system)
    found = found_session(session, ranks)
    own = own_sampling(
        {"temperature": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p},
        {
            "repeat_penalty": repeat_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias,
        },
        seed,
        is_greedy=greedy,
    )
    kept = own_grammar(json_schema, regex, grammar)
    is_told = logprobs is None or as_json or many.prompts is not None
    require(is_told, "`num_logprobs` are part of what --json prints", logprobs, "give --json")
    is_elsewhere = is_worker(ranks) or many.prompts is not None
    text = "" if is_elsewhere else read_prompt(prompt, file, is_needed=found is None)
    asked = None if is_elsewhere else with_system(text, system, raw=raw)
    from offload.engine.request import Request
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        config=config,
        device=device,
        gpu_memory=gpu_mem,
        ram=ram,
        dtype=dtype,
        context=context,
        tree=tree,
        rule=rule,
        threads=threads,
        profile=profile,
        link_limit=link_limit,
        invariant=invariant,
        lookup=lookup,
        lookup_length=lookup_length,
        ngram=ngram,
        datastore=datastore,
        lenience=lenience,
        ranks=ranks,
        draft_dtype=draft_dtype,
        experts=experts,
        pipeline=pipeline,
        slow_layer_s=slow_layer,
        parallel=parallel,
    )
    check_models(model, draft, options)
    with Console(
        is_quiet=quiet or as_json or is_worker(ranks), is_verbose=verbose, sizes_like=ram
    ) as console:
        sampling, note = choose_sampling(config or model, own, seed, console.wait)
        more = {"is_kept": session is not None, "num_logprobs": logprobs, "grammar": kept}
        request = Request(asked, sampling, max_tokens, stop, raw, found, **more)  # type: ignore[arg-type]
        if many.are_wished:
            write_many(model, draft, options, console, request, many, note=note, as_json=as_json)
            return
        with libraries(console):
            from offload.cli.text_run import write_text

            write_text(
                model, draft, options, console, request, note=note, session=session, as_json=as_json
            )


@app.command(
    short_help="Chat with a model larger than memory.",
    epilog="""Examples:

    offload chat -m Llama-3.1-70B-Instruct -d Llama-3.2-1B-Instruct --ram 32GiB

    offload chat -m big -d small --system "Answer in one sentence." --temp 0.7

    offload chat -m big -d small --session talk.session

    offload chat -m big -d small --quiet < questions.txt""",
)
def chat(
    model: flags.Model,
    draft: flags.Draft = None,
    config: flags.Config = None,
    system: flags.System = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "-n", "--max-tokens", metavar="N", min=1, help="of one answer; default: what has room"
        ),
    ] = None,
    temp: flags.OwnTemp = None,
    top_p: flags.OwnTopP = None,
    top_k: flags.OwnTopK = None,
    min_p: flags.OwnMinP = None,
    greedy: flags.Greedy = False,
    seed: flags.Seed = 0,
    repeat_penalty: flags.RepeatPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    stop: flags.Stop = None,
    session: flags.Session = None,
    device: flags.Device = "auto",
    gpu_mem: flags.GpuMem = None,
    ram: flags.Ram = None,
    context: flags.Context = None,
    dtype: flags.Dtype = "auto",
    draft_dtype: flags.DraftDtype = None,
    experts: flags.Experts = "auto",
    tree: flags.Tree = "auto",
    rule: flags.RuleName = "match",
    lenience: flags.Lenience = 1.0,
    lookup: flags.Lookup = None,
    lookup_length: flags.LookupLength = "1:16",
    ngram: flags.Ngram = None,
    datastore: flags.Datastore = None,
    threads: flags.Threads = None,
    profile: flags.ProfileFile = None,
    invariant: flags.Invariant = None,
    ranks: flags.Ranks = None,
    pipeline: flags.Pipeline = None,
    slow_layer: flags.SlowLayer = 0.0,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Chat with a model larger than memory; every line is a question, and only what is new is read."""
    own = own_sampling(
        {"temperature": temp, "top_p": top_p, "top_k": top_k, "min_p": min_p},
        {
            "repeat_penalty": repeat_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "logit_bias": logit_bias,
        },
        seed,
        is_greedy=greedy,
    )
    found_session(session, ranks)
    from offload.planning.options import LoadOptions, check_models

    options = LoadOptions(
        config=config,
        device=device,
        gpu_memory=gpu_mem,
        ram=ram,
        dtype=dtype,
        context=context,
        tree=tree,
        rule=rule,
        threads=threads,
        profile=profile,
        invariant=invariant,
        lookup=lookup,
        lookup_length=lookup_length,
        ngram=ngram,
        datastore=datastore,
        lenience=lenience,
        ranks=ranks,
        draft_dtype=draft_dtype,
        experts=experts,
        pipeline=pipeline,
        slow_layer_s=slow_layer,
    )
    check_models(model, draft, options)
    with Console(is_quiet=quiet or is_worker(ranks), is_verbose=verbose, sizes_like=ram) as console:
        sampling, note = choose_sampling(config or model, own, seed, console.wait)
        with libraries(console):
            from offload.cli.repl import ChatOptions, converse

            wishes = ChatOptions(sampling, note, system, max_tokens, stop, session)
            converse(model, draft, options, console, wishes)
