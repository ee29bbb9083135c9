"""``rankgate demo``: two real torchrun worlds on this machine, and every byte verified."""

from __future__ import annotations

import secrets
import sys
import time
from typing import Any

import click

from rankgate.coordinator.cli.demo.faults import DEAD_RANK, FAULTS, RANK_MISSING
from rankgate.coordinator.cli.demo.job import Job
from rankgate.coordinator.cli.demo.model import (
    CacheModel,
    ModelError,
    load_model,
)
from rankgate.proto.descriptor import PROFILES
from rankgate.proto.geometry import DTYPE_BYTES, GeometryError, heads_of_rank

_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--prefill-tp", type=_COUNT, default=2, show_default=True, help="Prefill ranks.")
@click.option("--decode-tp", type=_COUNT, default=4, show_default=True, help="Decode ranks.")
@click.option(
    "--model",
    default="llama-3.1-8b",
    show_default=True,
    metavar="NAME|PATH",
    help="A shipped model, or a config.json or its folder.",
)
@click.option("--layers", type=_COUNT, default=8, show_default=True, help="Attention layers kept.")
@click.option("--kv-heads", type=_COUNT, help="KV heads, instead of the model's.")
@click.option("--dtype", help="Cache dtype, instead of the model's.")
@click.option("--page-size", type=_COUNT, default=16, show_default=True, help="Tokens a page.")
@click.option("--pages", type=_COUNT, default=16, show_default=True, help="Most pages a request.")
@click.option("--requests", type=_COUNT, default=32, show_default=True, help="Requests in all.")
@click.option("--concurrency", type=_COUNT, default=4, show_default=True, help="Requests at once.")
@click.option(
    "--profile",
    type=click.Choice(PROFILES),
    default="native",
    show_default=True,
    help="Whose habits decide which ranks talk.",
)
@click.option("--break", "fault", type=click.Choice(FAULTS), help="Put in a fault; exit 3 if told.")
@click.option("--seed", type=click.IntRange(min=0), help="Of the bytes; drawn when not given.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=180.0,
    show_default=True,
    help="Seconds for everything.",
)
@click.option("--keep", is_flag=True, help="Keep the work directory with journals and logs.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def demo(**options: Any) -> None:  # noqa: ANN401 - click's own names, read by _job
    """Move KV caches between two torchrun worlds on this machine and verify every byte.

    Starts the daemon, a prefill and a decode world, runs a stream of requests, and prints who
    talked to whom, how much, and whether every byte is what it must be.

    Exit codes: 0 every byte agreed and nothing stayed staged; 1 not so; 2 usage; 3 with --break,
    the fault was told to everyone as it should be.
    """
    from rankgate.coordinator.cli.demo.progress import Show
    from rankgate.coordinator.cli.demo.report import print_json, print_report
    from rankgate.coordinator.cli.demo.run import DemoError, run_demo

    job = _job(options)
    _end_on_sigterm()
    try:
        with Show() as show:
            job, report = run_demo(job, keep=options["keep"], show=show)
    except DemoError as error:
        click.echo(f"rankgate demo: {error}", err=True)
        sys.exit(1)
    if options["as_json"]:
        print_json(report)
    else:
        print_report(report, job)
    sys.exit(report["exit"])


def _job(options: dict[str, Any]) -> Job:
    """Return the job that the flags describe.

    Raises:
        click.UsageError: they describe none.
    """
    model = _model(options)
    for flag in ("prefill_tp", "decode_tp"):
        try:
            heads_of_rank(model.kv_heads, options[flag], 0)
        except GeometryError as error:
            raise click.UsageError(f"--{flag.replace('_', '-')}: {error}") from error
    if options["fault"] == RANK_MISSING and options["decode_tp"] < 2:  # noqa: PLR2004 - one stays
        raise click.UsageError("--break rank-missing needs --decode-tp of at least 2; got 1")
    if options["fault"] == DEAD_RANK and options["requests"] < 4:  # noqa: PLR2004 - it dies amid them
        raise click.UsageError(
            f"--break dead-rank needs --requests of at least 4; got {options['requests']}"
        )
    seed = options["seed"]
    return Job(
        daemon="",
        model=model,
        prefill_tp=options["prefill_tp"],
        decode_tp=options["decode_tp"],
        page_size=options["page_size"],
        pages=options["pages"],
        requests=options["requests"],
        concurrency=options["concurrency"],
        seed=secrets.randbits(32) if seed is None else seed,
        profile=options["profile"],
        fault=options["fault"] or "",
        deadline=time.monotonic() + options["timeout"],
    )


def _model(options: dict[str, Any]) -> CacheModel:
    try:
        model = load_model(options["model"])
    except ModelError as error:
        raise click.UsageError(str(error)) from error
    dtype = options["dtype"] or model.dtype
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise click.UsageError(f"dtype {dtype!r} is not known; expected one of {known}")
    return CacheModel(
        name=model.name,
        model_type=model.model_type,
        layers=model.layers[: options["layers"]],
        kv_heads=options["kv_heads"] or model.kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )


def _end_on_sigterm() -> None:
    """Turn SIGTERM into an ordinary exit, so that the processes of the run are ended, too."""
    import signal

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
