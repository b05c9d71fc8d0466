"""`omnistage bench`: speed beside the reference library; `omnistage bench serve`: a service under load."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from omnistage.cli.common import DeviceOption, DTypeOption, SetOption, ends_on_error, err, out
from omnistage.core.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.bench.load import Plan, Run
    from omnistage.bench.measure import Outcome
    from omnistage.bench.workload import Kind, Workload

KEY_VARIABLE = "OMNISTAGE_API_KEY"
_LOAD = "Load"
_REQUESTS = "Requests"
_RESULTS = "Results"
_DEFAULT_REQUESTS = 100
_DEFAULT_CONCURRENCY = 4

app = typer.Typer(rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
@ends_on_error
def bench(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller sizes and fewer repeats: minutes become seconds.")
    ] = False,
    folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Also write results here.")] = None,
) -> None:
    """Run the same requests through Omnistage and the reference library, and print both speeds.

    `omnistage bench serve` measures a running service instead.

    Examples:

    ```
    omnistage bench --quick
    omnistage bench --out out/bench
    omnistage bench serve http://127.0.0.1:8000 --concurrency 16
    ```
    """
    if context.invoked_subcommand is not None:
        if quick or folder is not None:
            raise InvalidRequestError("--quick and --out before it are not for it; put --out behind it", param="serve")
        return
    from omnistage.bench.offline import run

    raise typer.Exit(run(quick=quick, out=folder, console=err()))


@app.command("serve")
@ends_on_error
def bench_serve(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The running service, like http://127.0.0.1:8000.")
    ] = None,
    serve: Annotated[
        list[str] | None,
        typer.Option(metavar="MODEL", help="Start a service of this model (a folder, or NAME=FOLDER). Repeatable."),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="The model to ask, or KIND=NAME. Repeatable; default: one that can."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar=KEY_VARIABLE, help="The service's key.", show_envvar=True)
    ] = None,
    mix: Annotated[
        str, typer.Option(help="Kinds and their shares: text, speech, tts, image.", rich_help_panel=_LOAD)
    ] = "text",
    rate: Annotated[
        float | None, typer.Option(help="Requests a second, at random times (Poisson).", rich_help_panel=_LOAD)
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help=f"Or so many at a time; default: {_DEFAULT_CONCURRENCY}.", min=1, rich_help_panel=_LOAD),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(help=f"How many; default: {_DEFAULT_REQUESTS}.", min=1, rich_help_panel=_LOAD),
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="Or for how long.", rich_help_panel=_LOAD)] = None,
    warmup: Annotated[int, typer.Option(help="Requests of each kind before it.", min=0, rich_help_panel=_LOAD)] = 3,
    timeout: Annotated[float, typer.Option(help="Seconds for a request.", min=0.1, rich_help_panel=_LOAD)] = 600.0,
    seed: Annotated[int, typer.Option(help="Same seed, same requests.", min=0, rich_help_panel=_LOAD)] = 0,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N or LOW..HIGH", help="Length of prompts.", rich_help_panel=_REQUESTS)
    ] = "32..256",
    max_tokens: Annotated[
        str, typer.Option(metavar="N or LOW..HIGH", help="Length of answers.", rich_help_panel=_REQUESTS)
    ] = "16..128",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prompts of your own, as JSON lines.", rich_help_panel=_REQUESTS)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option(help="Let answers run to their length.", rich_help_panel=_REQUESTS)
    ] = True,
    voice: Annotated[str | None, typer.Option(help="Whose voice speaks.", rich_help_panel=_REQUESTS)] = None,
    image_size: Annotated[
        str | None, typer.Option(metavar="WIDTHxHEIGHT", help="Of pictures.", rich_help_panel=_REQUESTS)
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.", min=1, rich_help_panel=_REQUESTS)] = None,
    folder: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write JSON and a plot here.", rich_help_panel=_RESULTS)
    ] = None,
    draw: Annotated[bool, typer.Option("--plot/--no-plot", help="With --out.", rich_help_panel=_RESULTS)] = True,
    older: Annotated[
        Path | None,
        typer.Option("--compare", metavar="JSON", help="An older report to set beside it.", rich_help_panel=_RESULTS),
    ] = None,
    goodput: Annotated[
        str | None,
        typer.Option(metavar="LIMITS", help="Count what is within, like ttft:0.5,ttfa:1.", rich_help_panel=_RESULTS),
    ] = None,
    player_buffer: Annotated[
        float,
        typer.Option(help="Seconds that a player waits at the first sound.", min=0.0, rich_help_panel=_RESULTS),
    ] = 0.1,
    sample_rate: Annotated[
        int, typer.Option(help="Of raw sound whose length the service does not say.", min=1, rich_help_panel=_RESULTS)
    ] = 24_000,
    overrides: SetOption = None,
    device: DeviceOption = None,
    dtype: DTypeOption = None,
) -> None:
    """Put load on a running service and measure what its clients see.

    Prints throughput, times to the first token and the first audio, gaps, stutter, real-time factor and errors; with
    --out also as JSON and as a plot. Requests come at their own times with --rate, or one after another from
    --concurrency workers. --set, --device and --dtype are for a service that --serve starts. Ends with 1 if the
    service failed a request or nothing of a kind succeeded; refusals (429) are counted and are no failure.

    Examples:

    ```
    omnistage bench serve http://127.0.0.1:8000 --concurrency 16 --requests 200
    omnistage bench serve http://127.0.0.1:8000 --mix text=8,speech=1,image=1 --rate 4 --seconds 60 --out out/load
    omnistage bench serve --serve out/lm --max-tokens 64
    ```
    """
    from omnistage.bench.load import Plan
    from omnistage.bench.measure import parse_goodput
    from omnistage.bench.tables import read_report
    from omnistage.bench.workload import Span, Workload, parse_mix, read_prompts

    _check(url, serve, rate, concurrency, requests, seconds, (overrides, device, dtype))
    count = requests if requests is not None or seconds is not None else _DEFAULT_REQUESTS
    plan = Plan(rate, concurrency or _DEFAULT_CONCURRENCY, count, seconds, timeout, sample_rate)
    kinds = parse_mix(mix)
    workload = Workload(
        kinds,
        {},
        seed,
        Span.parse(prompt_tokens, "--prompt-tokens"),
        Span.parse(max_tokens, "--max-tokens"),
        ignore_eos,
        image_size,
        steps,
        voice,
        read_prompts(prompts, kinds) if prompts is not None else {},
    )
    chosen = _chosen(model or [], list(kinds))
    wanted = _Wanted(plan, workload, chosen, warmup, player_buffer, parse_goodput(goodput) if goodput else None)
    before = read_report(older) if older is not None else None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)  # a place that cannot be written to is found out before the run
    with _service(url, serve or [], api_key, overrides or [], device, dtype) as address:
        raise typer.Exit(_measure(address, api_key, wanted, folder, draw, before))


@dataclass(slots=True)
class _Wanted:
    plan: Plan
    workload: Workload
    chosen: dict[Kind, str]
    warmup: int
    player_buffer: float
    limits: dict[str, float] | None

    def settings(self, url: str) -> dict[str, Any]:
        """What was asked for, for the report. No key."""
        plan, workload = self.plan, self.workload
        rate = f"{plan.rate:g} requests/s" if plan.rate is not None else f"{plan.concurrency} at a time"
        return {
            "url": url,
            "load": rate,
            "rate": plan.rate,
            "concurrency": plan.concurrency if plan.rate is None else None,
            "requests": plan.count,
            "seconds": plan.seconds,
            "mix": {str(kind): weight for kind, weight in workload.mix.items()},
            "models": {str(kind): name for kind, name in workload.models.items()},
            "seed": workload.seed,
            "prompt_tokens": str(workload.prompt_tokens),
            "max_tokens": str(workload.max_tokens),
            "tokens_per_word": round(workload.tokens_per_word, 3),
            "own_prompts": bool(workload.lines),
            "ignore_eos": workload.ignore_eos,
            "voice": workload.voice,
            "image_size": workload.image_size,
            "steps": workload.steps,
            "warmup": self.warmup,
            "timeout": plan.timeout,
            "player_buffer": self.player_buffer,
        }


def _check(
    url: str | None,
    serve: list[str] | None,
    rate: float | None,
    concurrency: int | None,
    requests: int | None,
    seconds: float | None,
    for_serving: tuple[object, ...],
) -> None:
    """Raise for options that do not go together."""
    if (url is None) == (not serve):
        raise InvalidRequestError("give the address of a running service, or --serve MODEL to start one", param="URL")
    if not serve and any(for_serving):
        raise InvalidRequestError("--set, --device and --dtype are for a service that --serve starts", param="--serve")
    if rate is not None and concurrency is not None:
        raise InvalidRequestError("excludes --concurrency; leave one of them out", param="--rate")
    if requests is not None and seconds is not None:
        raise InvalidRequestError("excludes --seconds; leave one of them out", param="--requests")
    for name, value in (("--rate", rate), ("--seconds", seconds)):
        if value is not None and not 0 < value < float("inf"):
            raise InvalidRequestError(f"must be above 0, got {value:g}", param=name)


def _chosen(given: list[str], kinds: list[Kind]) -> dict[Kind, str]:
    """Which model each kind asks, as far as it was said."""
    from omnistage.bench.workload import Kind

    for_all = [name for name in given if name.partition("=")[0] not in list(Kind)]
    if len(for_all) > 1:
        raise InvalidRequestError("one model for all kinds, or KIND=NAME for each, like image=draw", param="--model")
    chosen = dict.fromkeys(kinds, for_all[0]) if for_all else {}
    for entry in given:
        kind, found, name = entry.partition("=")
        if found and kind in list(Kind):
            if Kind(kind) not in kinds or not name:
                raise InvalidRequestError(f"{entry!r}: {kind} is not in --mix, or has no name", param="--model")
            chosen[Kind(kind)] = name
    return chosen


@contextlib.contextmanager
def _service(
    url: str | None, models: list[str], api_key: str | None, overrides: list[str], device: str | None, dtype: str | None
) -> Iterator[str]:
    """The address of the service to measure: the given one, or that of one which runs while this does."""
    if url is not None:
        yield url
        return
    from omnistage.bench.child import served

    arguments = []
    for entry in models:
        path = Path(entry)
        arguments += ["--model", entry if "=" in entry and not path.exists() else f"{path.resolve().name}={entry}"]
    for option, values in (("--set", overrides), ("--device", [device]), ("--dtype", [dtype])):
        for value in values:
            arguments += [option, value] if value is not None else []
    with contextlib.ExitStack() as stack:
        with err().status("starting the service"):
            environment = {"OMNISTAGE_API_KEYS": api_key} if api_key is not None else None
            address, _ = stack.enter_context(served(arguments, environment))
        yield address


def _measure(
    url: str, api_key: str | None, wanted: _Wanted, folder: Path | None, draw: bool, before: dict[str, Any] | None
) -> int:
    import asyncio

    from omnistage.bench.report import build
    from omnistage.bench.tables import compare, show

    run = asyncio.run(_load(url, api_key, wanted))
    report = build(run, wanted.plan, wanted.settings(url), wanted.player_buffer, wanted.limits)
    console = out()
    show(report, console)
    if before is not None:
        compare(before, report, console)
    if folder is not None:
        (folder / "bench_serve.json").write_text(report.dumps(wanted.player_buffer), encoding="utf-8")
        console.print(f"wrote {folder / 'bench_serve.json'}", soft_wrap=True)
        if draw and run.outcomes:
            _plot(report, folder / "bench_serve.png")
    return report.exit_code


def _plot(report: Any, file: Path) -> None:
    from omnistage.bench.plot import plot

    try:
        plot(report, file)
    except MissingDependencyError as error:
        err().print(f"no plot: {error}", style="yellow", soft_wrap=True)  # the figures are there; they took a while
    else:
        out().print(f"wrote {file}", soft_wrap=True)


async def _load(url: str, api_key: str | None, wanted: _Wanted) -> Run:
    from dataclasses import replace

    from omnistage.bench.load import Generator, calibrated, connect, models_for

    client = connect(url, api_key)
    try:
        with err().status("warming up"):
            kinds = list(wanted.workload.mix)
            models = await models_for(client, kinds, wanted.chosen, wanted.plan.timeout)
            wanted.workload = await calibrated(client, replace(wanted.workload, models=models), wanted.plan)
            await Generator(client, wanted.workload, wanted.plan).warm_up(wanted.warmup)
        with _bar(wanted.plan) as notice:
            return await Generator(client, wanted.workload, wanted.plan, notice).run()
    finally:
        await client.close()


@contextlib.contextmanager
def _bar(plan: Plan) -> Iterator[Any]:
    """A bar on standard error: how far the run is, and how many requests did not succeed."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    # Few redraws: they are this process's time, which is being measured.
    with Progress(*columns, console=err(), refresh_per_second=2) as bar:
        task, bad = bar.add_task("requests", total=plan.count), 0

        def notice(outcome: Outcome) -> None:
            nonlocal bad
            bad += not outcome.ok
            bar.update(task, advance=1, description=f"requests, {bad} not answered" if bad else "requests")

        yield notice
