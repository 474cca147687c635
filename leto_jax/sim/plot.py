"""Figures. matplotlib is imported when one is drawn, never before."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from leto_jax.errors import UsageError
from leto_jax.sim.plan import Cause

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CAUSE_COLOURS = {
    Cause.OVERHEAD: "#9aa5b1",
    Cause.CHECKPOINT: "#4c78a8",
    Cause.DETECT: "#b279a2",
    Cause.INIT: "#e45756",
    Cause.RESTORE: "#ff9da6",
    Cause.RECOMPUTE: "#f2a33a",
    Cause.SPARE_WAIT: "#72b7b2",
    Cause.DEGRADED: "#bab0ac",
}

LABEL_BOX = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}


def badput_bars(axes: "Axes", labels: Sequence[str], shares: Sequence[dict[str, float]]) -> None:
    """One horizontal bar for each label: per cent of wall time lost by cause; the number behind a bar is the ETTR.

    Args:
        shares: for each label, cause name -> fraction of wall time.
    """
    rows = range(len(labels))
    left = [0.0] * len(labels)
    for cause, colour in CAUSE_COLOURS.items():
        widths = [100 * share.get(cause.value, 0.0) for share in shares]
        if max(widths) < 0.02:
            continue
        axes.barh(rows, widths, left=left, color=colour, label=cause.value.replace("_", " "), height=0.68)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for row, (end, share) in enumerate(zip(left, shares, strict=True)):
        axes.text(
            end + max(left) * 0.012, row, f"{100 * share[Cause.PRODUCTIVE.value]:.1f} %", va="center", fontsize=9, zorder=3, bbox=LABEL_BOX
        )
    axes.set_yticks(rows, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max(left) * 1.14 or 1)
    axes.set_xlabel("time lost, % of wall time (number: ETTR)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="best")


def save_badput(path: Path, title: str, labels: Sequence[str], shares: Sequence[dict[str, float]]) -> None:
    """Write `badput_bars` as a picture of its own; the format follows from the suffix of `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.5, 1.6 + 0.42 * len(labels)), layout="constrained")
    badput_bars(axes, labels, shares)
    figure.suptitle(title.replace("; ", "\n", 1), x=0.01, ha="left", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--plot: expected a file that can be written, such as out.png, found {str(path)!r} ({error})") from error
    finally:
        pyplot.close(figure)
