"""`longwire run`: load a model over local and remote devices, and generate."""

from __future__ import annotations

import argparse
import json
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType
from typing import IO, Any

from rich.console import Console

from longwire.cli.options import (
    add_credentials,
    add_engine,
    created,
    credentials,
    log_to_stderr,
    names,
    positive,
    shares,
)
from longwire.cli.progress import load_progress
from longwire.errors import UsageError
from longwire.host.engine import ON_FAILURE, Engine
from longwire.host.generation import Generation
from longwire.host.sampling import Sampling
from longwire.host.tracing import Tracing
from longwire.native.model import FLASH_ATTENTION, SPLIT_MODES

__all__ = ["add_parser", "result"]


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="generate text with a model over local and remote devices",
        description="Load a GGUF model and continue a prompt. Without --rpc it runs "
        "on this machine alone, for comparison.",
    )
    parser.add_argument("-m", "--model", required=True, help="GGUF file")
    parser.add_argument(
        "--rpc",
        default="",
        metavar="HOST:PORT[,HOST:PORT...]",
        help="servers whose devices to use (longwire serve, or llama.cpp's)",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("-p", "--prompt", help="text to continue")
    prompt.add_argument(
        "--prompt-tokens",
        type=_tokens,
        metavar="N,N,...",
        help="token numbers to continue, for a model without a vocabulary",
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt in the model's template"
    )
    parser.add_argument(
        "-n",
        "--predict",
        type=int,
        default=128,
        metavar="N",
        help="most tokens to generate, -1 until the end (%(default)s)",
    )
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after an end-of-text token"
    )
    parser.add_argument(
        "--on-failure",
        choices=ON_FAILURE,
        default=ON_FAILURE[0],
        help="when a worker is lost: end, or go on over what is left (%(default)s)",
    )
    parser.add_argument(
        "--spare",
        default="",
        metavar="HOST:PORT[,HOST:PORT...]",
        help="more servers to go on with, for --on-failure resume",
    )
    _add_layout(parser)
    _add_sampling(parser)
    add_credentials(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object and nothing else"
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write a timeline of host, wire and workers to FILE, for "
        "https://ui.perfetto.dev",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="count",
        default=0,
        help="say what happens; -vvv the engine's log too",
    )
    parser.set_defaults(run=run)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    add_engine(parser)
    group.add_argument(
        "-ngl",
        "--gpu-layers",
        type=int,
        default=-1,
        metavar="N",
        help="layers to put on devices other than this machine's CPU (all)",
    )
    group.add_argument(
        "-dev",
        "--device",
        type=names,
        metavar="NAME[,NAME...]",
        help="which devices, in this order (remote ones are RPC0, RPC1, ...)",
    )
    group.add_argument(
        "-ts",
        "--tensor-split",
        type=shares,
        default=[],
        metavar="N,N,...",
        help="share of each device (default: by free memory)",
    )
    group.add_argument(
        "-sm",
        "--split-mode",
        choices=list(SPLIT_MODES),
        default="layer",
        help="how the model is cut over several devices (%(default)s)",
    )
    group.add_argument(
        "-c",
        "--ctx-size",
        type=int,
        default=4096,
        help="context, 0 for the model's own (%(default)s)",
    )
    group.add_argument(
        "-b", "--batch-size", type=positive, default=2048, help="batch (%(default)s)"
    )
    group.add_argument(
        "-ub", "--ubatch-size", type=positive, default=512, help="ubatch (%(default)s)"
    )
    group.add_argument(
        "-t", "--threads", type=positive, help="this machine's threads (half of all)"
    )
    group.add_argument(
        "-fa",
        "--flash-attn",
        choices=list(FLASH_ATTENTION),
        default="auto",
        help="flash attention (%(default)s)",
    )
    group.add_argument(
        "--exact",
        action="store_true",
        help="no weight repacking on this machine: bit-identical to workers",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    defaults = Sampling()
    group.add_argument(
        "--temp",
        type=float,
        default=defaults.temperature,
        help="temperature, 0 for greedy (%(default)s)",
    )
    group.add_argument("--top-k", type=int, default=defaults.top_k, help="%(default)s")
    group.add_argument(
        "--top-p", type=float, default=defaults.top_p, help="%(default)s"
    )
    group.add_argument(
        "-s",
        "--seed",
        type=int,
        default=defaults.seed,
        help="default: a new one each time",
    )


def _tokens(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def run(arguments: argparse.Namespace) -> int:
    """Generate; 130 when Ctrl-C stopped it."""
    log_to_stderr(arguments.verbose)
    sampling = Sampling(
        arguments.temp, arguments.top_k, arguments.top_p, arguments.seed
    )
    if arguments.chat and arguments.prompt is None:
        raise UsageError("--chat needs a prompt in words (-p)")
    if arguments.spare and arguments.on_failure != "resume":
        raise UsageError("--spare needs --on-failure resume")
    if arguments.predict < -1 or arguments.ctx_size < 0:
        raise UsageError("-n is at least -1, and -c at least 0")
    with _trace_file(arguments.trace) as file:
        return _run(arguments, sampling, file)


@contextmanager
def _trace_file(path: str | None) -> Iterator[IO[str] | None]:
    """Made before the model is loaded, which may take long to be in vain."""
    if path is None:
        yield None
        return
    with created(path) as file:
        yield file


def _run(
    arguments: argparse.Namespace, sampling: Sampling, file: IO[str] | None
) -> int:
    console = Console(stderr=True, quiet=arguments.json)
    with load_progress(console, arguments.model) as progress:
        engine = Engine(
            arguments.model,
            rpc=arguments.rpc or (),
            engine=arguments.engine,
            devices=arguments.device,
            n_gpu_layers=arguments.gpu_layers,
            split_mode=arguments.split_mode,
            tensor_split=arguments.tensor_split,
            n_ctx=arguments.ctx_size,
            n_batch=arguments.batch_size,
            n_ubatch=arguments.ubatch_size,
            n_threads=arguments.threads,
            exact=arguments.exact,
            flash_attention=arguments.flash_attn,
            spares=arguments.spare,
            on_failure=arguments.on_failure,
            credentials=credentials(arguments),
            on_progress=progress.on_progress,
            on_delivery=progress.on_delivery,
        )
    with engine:
        prompt = arguments.prompt_tokens or arguments.prompt
        if arguments.chat:
            prompt = engine.chat_prompt(prompt)
        generation = engine.generate(
            prompt,
            engine.context.n_ctx if arguments.predict == -1 else arguments.predict,
            sampling,
            stop_at_end=not arguments.ignore_eos,
        )
        with _traced(engine, file):
            interrupted = _stream(generation, quiet=arguments.json)
        if arguments.json:
            print(json.dumps(result(engine, generation)))
        else:
            console.print(_summary(generation), style="dim", highlight=False)
        return 130 if interrupted else 0


@contextmanager
def _traced(engine: Engine, file: IO[str] | None) -> Iterator[None]:
    """Draw what the engine does while the body runs, if there is a file for it."""
    if file is None:
        yield
        return
    with closing(Tracing(file)) as tracing:
        engine.tracing = tracing
        try:
            yield
        finally:
            engine.tracing = None


def _stream(generation: Generation, quiet: bool) -> bool:
    """Print the text as it comes; True when Ctrl-C ended it early."""
    with _interruptible() as interrupted:
        for token in generation:
            if not quiet:
                print(token.text, end="", flush=True)
            if interrupted:
                break
        if not quiet:
            print()
        return bool(interrupted)


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collect Ctrl-C, to stop between two tokens; a second one is not caught.

    An exception in the middle of a token would cost the connections.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, previous)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)


def result(engine: Engine, generation: Generation) -> dict[str, Any]:
    """What `--json` prints. The per-token figures are of the decode steps."""
    decode = generation.decode
    total, steps = decode.total(), max(1, decode.tokens)
    return {
        "tokens": generation.tokens,
        "text": generation.text,
        "n_prompt": len(generation.prompt),
        "prefill_tok_s": generation.prefill.tok_s,
        "decode_tok_s": decode.tok_s,
        "per_token": {
            "round_trips": total.round_trips / steps,
            "bytes_sent": total.bytes_sent / steps,
            "bytes_received": total.bytes_received / steps,
        },
        "load": [
            {
                "endpoint": str(delivery.endpoint),
                "bytes": delivery.total,
                "bytes_saved": delivery.from_store,
            }
            for delivery in engine.loaded.deliveries
        ],
        "devices": [
            {
                "name": device.name,
                "endpoint": device.endpoint,
                "layers": device.layers,
                "memory": device.memory,
            }
            for device in engine.report()
        ],
    }


def _summary(generation: Generation) -> str:
    decode = generation.decode
    total, steps = decode.total(), max(1, decode.tokens)
    prefill = generation.prefill
    return (
        f"prefill {prefill.tokens} tokens, {prefill.tok_s:.1f} tok/s; "
        f"decode {len(generation.tokens)} tokens, {decode.tok_s:.1f} tok/s; "
        f"per token {total.round_trips / steps:.2g} round trips, "
        f"{total.bytes_sent / steps:.0f} B out, "
        f"{total.bytes_received / steps:.0f} B in"
    )
