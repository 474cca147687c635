"""`leto report --html DIR`: the report as figures (PNG) and one page that needs nothing else."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leto_jax import errors
from leto_jax.goodput import journal

Event = Mapping[str, Any]
PRODUCTIVE, LOST, WAITING = "#4c72b0", "#c44e52", "#ccb974"
SHADES = {"recovery": "#c44e52", "recomputed": "#dd8452"}
DPI = 110


def write(report: Mapping[str, Any], events: Sequence[Event], rows: Sequence[Mapping[str, Any]], directory: Path) -> list[Path]:
    """Writes `timeline.png`, `badput.png`, `throughput.png`, `loss.png` and `report.html`. Returns them.

    report: of `report.summarise`. events: of the journal, oldest first. rows: of the metrics file (`step`, `time`, `loss`).
    Raises UsageError if the directory cannot be written to.
    """
    import matplotlib

    matplotlib.use("Agg")
    figures = {"timeline": _timeline(events), "badput": _badput(report), "throughput": _throughput(events, rows), "loss": _loss(rows)}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        paths = []
        for name, figure in figures.items():
            paths.append(directory / f"{name}.png")
            paths[-1].write_bytes(_png(figure))
        paths.append(directory / "report.html")
        paths[-1].write_text(_page(report, {path.stem: path.read_bytes() for path in paths[:-1]}), encoding="utf-8")
    except OSError as exception:
        raise errors.UsageError(f"--html: {directory} cannot be written to: {exception.strerror or exception}") from exception
    return paths


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics file; none if there is no such file. A torn last row is left out."""
    return [json.loads(line) for line in journal.whole_lines(path.read_bytes())] if path.is_file() else []


def recoveries(events: Sequence[Event]) -> list[tuple[float, float, float]]:
    """(failure, training again, what was lost is done again) of each, as times of day; a recovery that did not end lasts to the last event."""
    found, failed, back = [], None, None
    for event in events:
        if event["event"] == "failure" and failed is None:
            failed, back = event["time"] - event["detect_secs"], None
        elif event["event"] == "first_step" and failed is not None:
            back = back or event["time"]
        elif event["event"] == "takeover" and failed is not None:
            found.append((failed, back or event["time"], event["time"]))
            failed = None
    if failed is not None:
        found.append((failed, events[-1]["time"], events[-1]["time"]))
    return found


def lives(events: Sequence[Event]) -> list[tuple[str, int, float, float]]:
    """(role, rank, from, to) of every process; a shadow that is promoted is a trainer from then on."""
    found: list[tuple[str, int, float, float]] = []
    running: dict[tuple[int, int], tuple[str, float]] = {}  # by incarnation and rank: (role, since)

    def end(who: tuple[int, int], at: float) -> None:
        if who in running:
            role, since = running.pop(who)
            found.append((role, who[1], since, at))

    for event in events:
        kind, at = event["event"], event["time"]
        who = (event.get("incarnation", 0), event.get("rank", 0))
        if kind == "spawn":
            running[who] = (event["role"], at)
        elif kind == "ready" and who in running:
            end(who, at)
            running[who] = ("shadow, ready", at)
        elif kind == "attached" and running.get(who, ("trainer",))[0] != "trainer":
            end(who, at)
            running[who] = ("trainer", at)
        elif kind in ("failure", "refused", "released"):  # the end of a whole generation
            for each in [each for each in running if each[0] == who[0]]:
                end(each, at)
        elif kind == "done":
            end(who, at)
    for who in list(running):
        end(who, events[-1]["time"])
    return sorted(found, key=lambda item: item[2])


def _axes(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _shade(axes: Any, events: Sequence[Event], begin: float) -> None:
    for number, (failed, back, done) in enumerate(recoveries(events)):
        for (name, colour), first, last in zip(SHADES.items(), (failed, back), (back, done), strict=True):
            if last > first:
                axes.axvspan(first - begin, last - begin, color=colour, alpha=0.25, linewidth=0, label=name if number == 0 else None)


def _timeline(events: Sequence[Event]) -> Any:
    roles = {"trainer": PRODUCTIVE, "shadow": WAITING, "shadow, ready": "#55a868"}
    begin, found = events[0]["time"], lives(events)
    lanes = sorted({(rank, role.partition(",")[0]) for role, rank, _, _ in found})
    figure, axes = _axes(10, 0.5 * max(1, len(lanes)) + 1.4)
    for role, rank, first, last in found:
        axes.barh(
            lanes.index((rank, role.partition(",")[0])), last - first, left=first - begin, height=0.6, color=roles[role], edgecolor="white"
        )
    for failed, _, _ in recoveries(events):
        axes.axvline(failed - begin, color=LOST, linewidth=1)
    axes.set_yticks(range(len(lanes)), [f"rank {rank}, {role}" for rank, role in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the start (red: failures; green: ready to take over)")
    axes.set_title("Processes", loc="left")
    return figure


def _badput(report: Mapping[str, Any]) -> Any:
    spent = {cause: secs for cause, secs in report["badput_secs"].items() if secs > 0}
    figure, axes = _axes(10, 0.32 * max(1, len(spent)) + 1.4)
    wall = report["wall_secs"] or 1.0
    axes.barh(
        range(len(spent)),
        [100 * secs / wall for secs in spent.values()],
        color=[PRODUCTIVE if c == "productive" else WAITING for c in spent],
    )
    for number, secs in enumerate(spent.values()):
        axes.text(100 * secs / wall, number, f" {secs:.2f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(spent)), [cause.replace("_", " ") for cause in spent])
    axes.invert_yaxis()
    axes.set_xlabel("% of wall time")
    axes.set_title(f"Where the time went: ETTR {100 * report['ettr']:.1f} %, goodput {100 * report['goodput']:.1f} %", loc="left")
    return figure


def _throughput(events: Sequence[Event], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Steps a second, over bins of a hundredth of the time."""
    figure, axes = _axes(10, 3.2)
    begin, end = events[0]["time"], events[-1]["time"]
    times = [row["time"] - begin for row in rows if "time" in row]
    if times and end > begin:
        width = max((end - begin) / 100, 1e-3)
        bins = [width * n for n in range(101)]
        counts = [0] * 100
        for at in times:
            counts[min(99, max(0, int(at / width)))] += 1
        axes.stairs([count / width for count in counts], bins, color=PRODUCTIVE, fill=True, alpha=0.7)
    _shade(axes, events, begin)
    if recoveries(events):
        axes.legend(frameon=False, fontsize=8)
    axes.set_xlabel("seconds since the start")
    axes.set_ylabel("new steps / s")
    axes.set_title("Throughput", loc="left")
    return figure


def _loss(rows: Sequence[Mapping[str, Any]]) -> Any:
    figure, axes = _axes(10, 3.2)
    axes.plot([row["step"] for row in rows if "loss" in row], [row["loss"] for row in rows if "loss" in row], color=PRODUCTIVE, linewidth=1)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.set_title("Loss, one value for each step whatever failed meanwhile", loc="left")
    return figure


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot

    buffer = io.BytesIO()
    figure.savefig(buffer, dpi=DPI, format="png")
    pyplot.close(figure)
    return buffer.getvalue()


def _page(report: Mapping[str, Any], figures: Mapping[str, bytes]) -> str:
    percent = lambda value: "-" if value is None else f"{100 * value:.2f} %"
    summary = [
        ("steps", report["steps"]),
        ("wall time", f"{report['wall_secs']:.1f} s"),
        ("goodput", percent(report["goodput"])),
        ("ETTR", percent(report["ettr"])),
        ("parity coverage", percent(report["coverage"])),
        ("parity coverage with the peer", percent(report["peer_coverage"])),
        ("takeovers", len(report["takeovers"])),
    ]
    columns = ("kind", "phase", "step", "path", "level", "detect_secs", "takeover_secs", "lost_steps", "compiles")
    shown = lambda value: f"{value:.3f}" if isinstance(value, float) else str(value)
    takeovers = [[shown(item[column]) for column in columns] for item in report["takeovers"]]
    spent = [
        (cause.replace("_", " "), f"{secs:.3f}", percent(secs / (report["wall_secs"] or 1)))
        for cause, secs in report["badput_secs"].items()
    ]
    images = "".join(f'<img alt="{name}" src="data:image/png;base64,{base64.b64encode(data).decode()}">' for name, data in figures.items())
    title = f"leto: job {html.escape(report['job'])}"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em}img{max-width:100%;display:block;margin:1.5em 0}"
        "table{border-collapse:collapse;margin:1em 0}td,th{padding:.2em .9em;border-bottom:1px solid #ddd;text-align:right}td:first-child,th:first-child"
        "{text-align:left}</style>"
        f"<h1>{title}</h1>{_table((), summary)}{images}<h2>Takeovers</h2>{_table(columns, takeovers)}"
        f"<h2>Wall time by cause</h2>{_table(('cause', 'seconds', 'share'), spent)}</html>"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    head = "<tr>" + "".join(f"<th>{html.escape(name.replace('_', ' '))}</th>" for name in columns) + "</tr>" if columns else ""
    body = "".join("<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>" for row in rows)
    return f"<table>{head}{body}</table>" if rows else "<p>none</p>"
