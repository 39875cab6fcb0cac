"""The `natgrad` command: draw a descent, list experiments, run them, and rebuild their reports.

    natgrad show ["(x - 1)^2"] [--out descent.png]
    natgrad list
    natgrad run digits --help
    natgrad run digits [--size quick] [--seeds 3] [--set seconds=5]... [--out runs/digits]
    natgrad report runs/digits

A run that is stopped goes on where it was when the same command is given again. One folder holds the runs of one
plan: a command with other settings is refused there (more seeds are welcome). Bad input ends with exit code 2.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import typer
    from typer.core import TyperCommand

NEEDED = ("typer", "rich", "matplotlib", "jinja2", "sklearn")


def main() -> None:
    """Entry point of the command."""
    if needs_torch(sys.argv[1:]):
        say_loading(sys.stderr)
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"natgrad: the command needs {', '.join(missing)}: pip install -e ./lab, from a clone")
    application()()


def needs_torch(words: "Sequence[str]") -> bool:
    """Whether the command loads PyTorch: its help and that of its parts do not."""
    return list(words) in (["list"], ["show"]) or not set(words) <= {"--help", "list", "report", "run", "show"}


def say_loading(stream: TextIO) -> None:
    """Say at once that something happens: to load PyTorch takes seconds."""
    if stream.isatty():
        stream.write("natgrad: loading PyTorch ...\n")
        stream.flush()


def application() -> "typer.Typer":
    """The commands, put together."""
    import typer

    app = typer.Typer(
        help="Natural gradient for PyTorch: pictures and experiments.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.command("show")
    def show_command(
        function: Annotated[
            str | None,
            typer.Argument(
                help="A formula in x, or in x1 and x2 for signs; (x - 1)^2 by default. Put -- before a minus."
            ),
        ] = None,
        family: Annotated[
            str, typer.Option(help="normal: mean and deviation of x; signs: x1 and x2 are -1 or 1.")
        ] = "normal",
        start: Annotated[
            str | None, typer.Option(help="Where both paths start, A,B (default: near the upper left corner).")
        ] = None,
        x: Annotated[str | None, typer.Option(help="First and last value of the first axis, A,B.")] = None,
        y: Annotated[str | None, typer.Option(help="First and last value of the second axis, A,B.")] = None,
        out: Annotated[Path, typer.Option(help="The picture, .png, .svg or .pdf.")] = Path("descent.png"),
    ) -> None:
        """Draw how the mean of a function falls by the gradient, left, and by the natural gradient, right.

        The axes are the mean of x and the log of its deviation, or the chances that x1 and x2 are 1. Both paths start
        at one point. Every arrow is the direction of steepest descent: left in the axes' own lengths, right in the
        lengths of the distributions, which are the same in any coordinates. Means of x are exact for polynomials up to
        degree 15.
        """

        def show() -> None:
            from natgrad_lab.descent import draw_descent

            drawn, place = draw_descent(function, family, start, x, y, out)
            typer.echo(f"E[{drawn}] by the gradient, left, and by the natural gradient, right: {place}")

        run_guarded(show)

    @app.command("list")
    def list_command() -> None:
        """List the experiments."""
        list_experiments()

    @app.command("run", cls=command_with_settings())
    def run_command(
        name: Annotated[str, typer.Argument(help="The experiment, one of `natgrad list`.")],
        seeds: Annotated[
            int | None, typer.Option(help="How many seeds (default: those of the experiment).", min=1)
        ] = None,
        size: Annotated[
            str | None, typer.Option(help="quick, about a minute, or paper (default: that of `natgrad list`).")
        ] = None,
        set_: Annotated[
            list[str] | None,
            typer.Option("--set", help="A setting, key=value; may be repeated. `NAME --help` lists them."),
        ] = None,
        out: Annotated[
            Path | None, typer.Option(help="Folder of records and report (default: runs/NAME, or runs/NAME-SIZE).")
        ] = None,
    ) -> None:
        """Run an experiment, or go on with one that was stopped, and write its report."""
        run_guarded(lambda: run(name, seeds, size, set_ or [], out))

    @app.command("report")
    def report_command(folder: Annotated[Path, typer.Argument(help="A folder that `natgrad run` wrote.")]) -> None:
        """Rebuild the tables, the figures and the page from the records."""
        run_guarded(lambda: report(folder))

    return app


def command_with_settings() -> "type[TyperCommand]":
    """A command whose `NAME --help` shows the settings of that experiment too."""
    import typer
    from typer.core import TyperCommand

    class CommandWithSettings(TyperCommand):
        """Prints the settings below the help when an experiment is named."""

        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Looks for an experiment's name beside `--help`."""
            first = [word for word in args[:1] if not word.startswith("-")]  # a name that nobody knows is refused
            if "--help" in args and needs_torch(args) and (named := list_named(args) or first):
                typer.echo(self.get_help(ctx), nl=False)
                run_guarded(lambda: show_settings(named[0]))
                ctx.exit()
            return super().parse_args(ctx, args)

    return CommandWithSettings


def list_named(words: "Sequence[str]") -> list[str]:
    """The experiments that are named."""
    from natgrad_lab.experiments import EXPERIMENTS

    return [word for word in words if word in EXPERIMENTS]


def show_settings(name: str) -> None:
    """Print the settings of an experiment with their defaults."""
    from rich.console import Console
    from rich.table import Table

    from natgrad_lab.experiments import find
    from natgrad_lab.experiments.settings import describe_settings

    experiment = find(name)
    table = Table.grid(padding=(0, 3, 0, 1))
    for overflow in ("ellipsis", "fold", "ellipsis"):  # a default is shown whole, since people copy it
        table.add_column(overflow=overflow)
    for setting, default, comment in describe_settings(experiment.settings):
        table.add_row(f"[bold]{setting}[/]", default, comment)
    console = Console()
    console.print(f"{name}: {experiment.summary}", highlight=False)
    console.print(f"\nIts settings, --set key=value; --seeds {experiment.seeds} by default:", highlight=False)
    console.print(table, highlight=False)


def list_experiments() -> None:
    """Print every experiment's name and what it does."""
    from rich.console import Console
    from rich.table import Table

    from natgrad_lab.experiments import EXPERIMENTS, find

    table = Table.grid("", "", "", padding=(0, 3, 0, 0))
    table.columns[1].justify = "right"
    for name in EXPERIMENTS:
        experiment = find(name)
        minutes = experiment.minutes or 0  # 0 where it was not measured
        took = f"{minutes:.0f} min" if minutes >= 1 else f"{minutes * 60:.0f} s" if minutes else ""
        table.add_row(f"[bold]{name}[/]", took, experiment.summary)
    console = Console()
    console.print(table)
    console.print("Minutes are those of one core with the defaults; `natgrad run NAME --help` lists the settings.")


def run(name: str, seeds: int | None, size: str | None, assignments: list[str], out: Path | None) -> None:
    """Run an experiment into a folder, then report on it."""
    from rich.console import Console

    from natgrad_lab.experiments import LabError, execute, find, interruptible, override
    from natgrad_lab.experiments.progress import ProgressDisplay

    experiment = find(name)
    chosen = dict(experiment.size(size))
    out = out or Path("runs") / (name if size is None else f"{name}-{size}")
    if out.exists() and not out.is_dir():
        raise LabError(f"--out {out} is a file, expected a folder: it holds the records and the report")
    if size is not None and not chosen:
        Console(stderr=True).print(f"{name} has no settings of its own for --size {size}: its defaults are taken")
    usual = chosen.pop("seeds", experiment.seeds)
    many = range(usual if seeds is None else seeds)
    settings = override(experiment.settings, assignments, chosen)
    with interruptible() as stopped, ProgressDisplay(Console(stderr=True)) as display:
        execute(experiment, settings, many, out, display, stopped)
    report(out)


def report(folder: Path) -> None:
    """Rebuild a folder's report and print its tables and verdicts."""
    from rich.console import Console

    from natgrad_lab.report import build, render_terminal

    numbers, page = build(folder)
    console = Console()
    for part in render_terminal(numbers):
        console.print(part, highlight=False)
    console.print(f"Report: {page}", soft_wrap=True, highlight=False)


def run_guarded(work: "Callable[[], None]") -> None:
    """Do the work; turn bad input into one sentence and exit code 2, an interruption into 130."""
    import typer

    from natgrad_lab.data import DataError
    from natgrad_lab.experiments import Interrupted, LabError

    try:
        work()
    except (LabError, DataError) as error:
        typer.echo(f"natgrad: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"natgrad: {error.filename}: {error.strerror}; give a place that can be read and written", err=True)
        raise typer.Exit(2) from error
    except Interrupted as error:
        typer.echo("natgrad: stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from error


if __name__ == "__main__":
    main()
