"""`omnistage bench`: speed beside the reference library; `omnistage bench serve`: a service under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from omnistage.cli.common import ends_on_error, err, out, progress_columns
from omnistage.cli.help import Command, Group
from omnistage.cli.options import ModelOptions, expand_options, option
from omnistage.core.errors import InvalidRequestError, MissingDependencyError

if TYPE_CHECKING:
    from omnistage.bench.load import Load, Run
    from omnistage.bench.measure import Outcome
    from omnistage.bench.report import Report
    from omnistage.bench.workload import Kind, Workload

KEY_VARIABLE = "OMNISTAGE_API_KEY"
_DEFAULT_REQUESTS = 100
_DEFAULT_CONCURRENCY = 4

app = typer.Typer(cls=Group, rich_markup_mode="markdown")


@app.callback(invoke_without_command=True)
@ends_on_error
def bench(
    context: typer.Context,
    quick: Annotated[
        bool, typer.Option("--quick", help="Smaller sizes and fewer repeats: seconds instead of minutes.")
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
            raise InvalidRequestError("--quick is not supported here; put --out after serve", param="serve")
        return
    from omnistage.bench.offline import run

    raise typer.Exit(run(quick=quick, out=folder, console=err()))


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Which service and models are measured."""

    serve: list[str] = option(
        [], "Start a service of this model (a folder, or NAME=FOLDER). Repeatable.", metavar="MODEL"
    )
    model: list[str] = option(
        [], "The model to request, or KIND=NAME. Repeatable; default: the first that fits.", metavar="NAME"
    )
    api_key: str | None = option(None, "The service's key.", envvar=KEY_VARIABLE, show_envvar=True)

    def models(self, kinds: list[Kind]) -> dict[Kind, str]:
        """The models that were named, by kind."""
        from omnistage.bench.workload import Kind

        for_all = [name for name in self.model if name.partition("=")[0] not in list(Kind)]
        if len(for_all) > 1:
            raise InvalidRequestError(
                "one model for all kinds, or KIND=NAME for each, like image=draw", param="--model"
            )
        models = dict.fromkeys(kinds, for_all[0]) if for_all else {}
        for entry in self.model:
            kind, equals, name = entry.partition("=")
            if equals and kind in list(Kind):
                if Kind(kind) not in kinds or not name:
                    raise InvalidRequestError(f"{entry!r}: {kind} is not in --mix, or has no name", param="--model")
                models[Kind(kind)] = name
        return models

    @contextlib.contextmanager
    def address(self, url: str | None, settings: ModelOptions) -> Iterator[str]:
        """The address of the service: `url`, or that of one which runs until this ends."""
        if (url is None) == (not self.serve):
            raise InvalidRequestError(
                "give the address of a running service, or --serve MODEL to start one", param="URL"
            )
        if url is not None:
            if settings != ModelOptions():
                message = "--config, --set, --device and --dtype are for a service that --serve starts"
                raise InvalidRequestError(message, param="--serve")
            yield url
            return
        from omnistage.bench.child import serve_models

        environment = {"OMNISTAGE_API_KEYS": self.api_key} if self.api_key is not None else None
        with contextlib.ExitStack() as stack:
            with err().status("starting the service"):
                address, _ = stack.enter_context(serve_models(self._arguments(settings), environment))
            yield address

    def _arguments(self, settings: ModelOptions) -> list[str]:
        """Of `omnistage serve`."""
        arguments = []
        for entry in self.serve:
            path = Path(entry)
            arguments += ["--model", entry if "=" in entry and not path.exists() else f"{path.resolve().name}={entry}"]
        for entry in settings.overrides:
            arguments += ["--set", entry]
        for name, value in (("config", settings.config), ("device", settings.device), ("dtype", settings.dtype)):
            arguments += [] if value is None else [f"--{name}", str(value)]
        return arguments


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How many requests, and when."""

    PANEL: ClassVar[str] = "Load"
    mix: str = option("text", "Kinds and their shares: text, speech, tts, image.")
    rate: float | None = option(None, "Requests per second, at random times (Poisson).")
    concurrency: int | None = option(None, f"Or this many concurrent requests; default: {_DEFAULT_CONCURRENCY}.", min=1)
    requests: int | None = option(None, f"Number of requests; default: {_DEFAULT_REQUESTS}.", min=1)
    seconds: float | None = option(None, "Or duration of the run.")
    warmup: int = option(3, "Requests of each kind before the run.", min=0)
    timeout: float = option(600.0, "Seconds for a request.", min=0.1)
    seed: int = option(0, "Same seed, same requests.", min=0)

    def load(self, sample_rate: int) -> Load:
        from omnistage.bench.load import Load

        if self.rate is not None and self.concurrency is not None:
            raise InvalidRequestError("excludes --concurrency; leave one of them out", param="--rate")
        if self.requests is not None and self.seconds is not None:
            raise InvalidRequestError("excludes --seconds; leave one of them out", param="--requests")
        for name, value in (("--rate", self.rate), ("--seconds", self.seconds)):
            if value is not None and not 0 < value < float("inf"):
                raise InvalidRequestError(f"must be above 0, got {value:g}", param=name)
        count = self.requests if self.requests is not None or self.seconds is not None else _DEFAULT_REQUESTS
        concurrency = self.concurrency or _DEFAULT_CONCURRENCY
        return Load(self.rate, concurrency, count, self.seconds, self.timeout, sample_rate)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What each request asks for."""

    PANEL: ClassVar[str] = "Requests"
    prompt_tokens: str = option("32..256", "Length of prompts.", metavar="N or LOW..HIGH")
    max_tokens: str = option("16..128", "Length of outputs.", metavar="N or LOW..HIGH")
    prompts: Path | None = option(None, "Prompts from a file, as JSON lines.", metavar="FILE")
    ignore_eos: bool = option(True, "Generate up to the full length.")
    temperature: float | None = option(None, "Of text; default: the service's own.", min=0.0)
    voice: str | None = option(None, "Voice of speech.")
    image_size: str | None = option(None, "Size of pictures.", metavar="WIDTHxHEIGHT")
    steps: int | None = option(None, "Denoising steps.", min=1)

    def workload(self, load: LoadOptions) -> Workload:
        from omnistage.bench.workload import Range, Workload, parse_mix, read_prompts

        mix = parse_mix(load.mix)
        return Workload(
            mix,
            {},
            load.seed,
            Range.parse(self.prompt_tokens, "--prompt-tokens"),
            Range.parse(self.max_tokens, "--max-tokens"),
            self.ignore_eos,
            self.temperature,
            self.image_size,
            self.steps,
            self.voice,
            read_prompts(self.prompts, mix) if self.prompts is not None else {},
        )


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """What is computed from the run, and where it goes."""

    PANEL: ClassVar[str] = "Results"
    folder: Path | None = option(None, "Write JSON and a plot to this folder.", "--out", metavar="DIR")
    plot: bool = option(True, "With --out.", "--plot/--no-plot")
    compare: Path | None = option(None, "An older report to compare with.", metavar="JSON")
    goodput: str | None = option(None, "Count requests within these limits, like ttft:0.5,ttfa:1.", metavar="LIMITS")
    player_buffer: float = option(0.0, "Seconds that a player waits after the first audio before it starts.", min=0.0)
    sample_rate: int = option(24_000, "Of raw audio whose duration the service does not report.", min=1)

    def present(self, report: Report, older: dict[str, Any] | None) -> None:
        from omnistage.bench.tables import compare, print_report

        console = out()
        print_report(report, console)
        if older is not None:
            compare(older, report, console)
        if self.folder is None:
            return
        (self.folder / "bench_serve.json").write_text(report.dumps(self.player_buffer), encoding="utf-8")
        console.print(f"wrote {self.folder / 'bench_serve.json'}", soft_wrap=True)
        if self.plot and report.outcomes:
            _plot(report, self.folder / "bench_serve.png")


def bench_serve(
    target: TargetOptions,
    load: LoadOptions,
    requests: RequestOptions,
    results: ResultOptions,
    settings: ModelOptions,
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The running service, like http://127.0.0.1:8000.")
    ] = None,
) -> None:
    """Put load on a running service and measure what its clients see.

    Prints throughput, times to the first token and the first audio, gaps, stutter, real-time factor and errors; with
    --out also as JSON and as a plot. Requests are sent at random times with --rate, or one after another by
    --concurrency workers. --set, --config, --device and --dtype are for a service that --serve starts. Exit code 1 if
    the service failed a request or nothing of a kind succeeded; refusals (429) are counted and are no failure.

    Examples:

    ```
    omnistage bench serve http://127.0.0.1:8000 --concurrency 16 --requests 200
    omnistage bench serve http://127.0.0.1:8000 --mix text=8,speech=1,image=1 --rate 4 --seconds 60 --out out/load
    omnistage bench serve --serve out/lm --max-tokens 64
    ```
    """
    from omnistage.bench.measure import parse_goodput
    from omnistage.bench.report import build
    from omnistage.bench.tables import read_report

    total, workload = load.load(results.sample_rate), requests.workload(load)
    models = target.models(list(workload.mix))
    limits = parse_goodput(results.goodput) if results.goodput else None
    older = read_report(results.compare) if results.compare is not None else None
    with target.address(url, settings) as address:
        if results.folder is not None:
            results.folder.mkdir(parents=True, exist_ok=True)  # before the run: it may not be writable
        run, workload = asyncio.run(_run(address, target.api_key, total, workload, models, load.warmup))
    values = {
        **asdict(load),
        **asdict(requests),
        "url": address,
        "load": str(total),
        "concurrency": total.concurrency if total.rate is None else None,
        "requests": total.count,
        "mix": {str(kind): weight for kind, weight in workload.mix.items()},
        "models": {str(kind): name for kind, name in workload.models.items()},
        "prompts": bool(workload.prompts),
        "tokens_per_word": round(workload.tokens_per_word, 3),
        "player_buffer": results.player_buffer,
    }
    report = build(run, total, values, results.player_buffer, limits)
    results.present(report, older)
    raise typer.Exit(report.exit_code)


app.command("serve", cls=Command)(ends_on_error(expand_options(bench_serve)))


def _plot(report: Report, file: Path) -> None:
    from omnistage.bench.plot import plot

    try:
        plot(report, file)
    except MissingDependencyError as error:
        err().print(f"no plot: {error}", style="yellow", soft_wrap=True)  # the run took a while: keep its figures
    else:
        out().print(f"wrote {file}", soft_wrap=True)


async def _run(
    url: str, api_key: str | None, load: Load, workload: Workload, models: dict[Kind, str], warmup: int
) -> tuple[Run, Workload]:
    """Warm the service up and measure it; also the workload with its models and measured prompt lengths."""
    from omnistage.bench.load import Generator, calibrate, choose_models, connect

    client = connect(url, api_key)
    try:
        with err().status("warming up"):
            models = await choose_models(client, list(workload.mix), models, load.timeout)
            workload = await calibrate(client, replace(workload, models=models), load)
            await Generator(client, workload, load).warm_up(warmup)
        with _bar(load) as on_outcome:
            return await Generator(client, workload, load, on_outcome).run(), workload
    finally:
        await client.close()


@contextlib.contextmanager
def _bar(load: Load) -> Iterator[Callable[[Outcome], None]]:
    """A bar on standard error: how far the run is, and how many requests failed or were refused."""
    from rich.progress import MofNCompleteColumn, Progress

    # Few refreshes: they take time of this process, which is measured.
    columns = progress_columns(MofNCompleteColumn())
    with Progress(*columns, console=err(), refresh_per_second=2) as bar:
        task, errors = bar.add_task("requests", total=load.count), 0

        def on_outcome(outcome: Outcome) -> None:
            nonlocal errors
            errors += not outcome.ok
            bar.update(task, advance=1, description=f"requests, {errors} without success" if errors else "requests")

        yield on_outcome
