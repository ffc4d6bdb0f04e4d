"""A plot of branch and bound: the worst bound and the open domains over time (general.plot_file)."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from abcrown_dist.report.files import check_writable, write_whole
from abcrown_dist.report.summary import Round, thin
from abcrown_dist.util.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Two of Okabe and Ito's colours, which the colour-blind tell apart too, dark enough for text.
_BOUND, _OPEN, _QUIET = "#0072b2", "#d55e00", "#707070"
_KINDS = ("pdf", "png", "svg")  # those that need no other program, and look alike
_MOST = 1e30  # margins beyond are drawn as a gap: an axis cannot hold them
_MANY = 1000  # open domains from which on their axis is logarithmic
_INCHES, _DPI = (8.0, 4.5), 150


def check_plot(path: str | Path) -> None:
    """Find out before a run what would keep its plot from being written.

    Raises:
        ConfigError: matplotlib is missing, the file's kind is none of `_KINDS`, or it cannot be written.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        missing = "not installed" if getattr(error, "name", None) == "matplotlib" else f"broken ({error})"
        raise ConfigError(
            f"a plot needs matplotlib, which is {missing}: pip install 'abcrown_dist[plot]'"
        ) from None
    if _kind(path) not in _KINDS:
        raise ConfigError(f"cannot plot to '{path}': its name must end in one of .{', .'.join(_KINDS)}")
    check_writable(path)


def write_plot(path: str | Path, rounds: Sequence[Round], title: str) -> None:
    """Draw the rounds and write them in the format that the file's suffix names (none: PNG).

    The worst bound is a line against the left axis, whose zero is where the property is proved; open
    domains are an area against the right one. Both hold from one round to the next, and are drawn so.

    Args:
        path: the file; see `check_plot`.
        rounds: in order of time; without any, the plot says so.
        title: what was verified, and the answer.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib import rc_context

    content = io.BytesIO()
    # No date, and fixed ids in SVG: the same run gives the same file. Its text stays text.
    with rc_context({"svg.hashsalt": "abcrown_dist", "svg.fonttype": "none"}):
        figure = draw(thin(rounds), title)
        figure.savefig(content, format=_kind(path), dpi=_DPI, metadata=_undated(_kind(path)) or None)
    write_whole(path, content.getvalue())


def _kind(path: str | Path) -> str:
    return Path(path).suffix.removeprefix(".").lower() or "png"


def _undated(kind: str) -> dict[str, None]:
    return {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind, {})


def draw(rounds: Sequence[Round], title: str) -> Figure:
    """The figure of `write_plot`, made without pyplot: no window system, no global state."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES, layout="constrained")
    plain = title.replace("$", r"\$")  # the name of a file is no formula
    figure.suptitle(plain, fontsize=10, x=0.01, ha="left", wrap=True)
    bound = figure.add_subplot()
    if not rounds:
        bound.set_axis_off()
        bound.text(0.5, 0.5, "no round of branch and bound was needed or reached", ha="center", color=_QUIET)
        return figure
    domains = bound.twinx()
    bound.set_zorder(domains.get_zorder() + 1)  # the line above the area
    bound.patch.set_visible(False)
    seconds = [found.seconds for found in rounds]
    _draw_domains(domains, seconds, [found.open for found in rounds])
    _draw_bound(bound, seconds, [found.worst for found in rounds])
    bound.set_xlim(left=0)
    bound.set_xlabel("seconds since the run began")
    bound.set_title(_last_line(rounds[-1]), loc="left", fontsize=8, color=_QUIET)
    return figure


def _last_line(last: Round) -> str:
    return (
        f"rounds: {last.number:,}   domains visited: {last.visited:,}   proved: {last.verified:,}   "
        f"open: {last.open:,}"
    )


def _draw_bound(axes: Axes, seconds: Sequence[float], worst: Sequence[float]) -> None:
    """What is not finite leaves a gap: there is no worst bound where no domain is open."""
    finite = [value if abs(value) < _MOST else math.nan for value in worst]
    alone = "o" if len(seconds) == 1 else ""
    axes.plot(seconds, finite, color=_BOUND, linewidth=1.6, drawstyle="steps-post", marker=alone)
    axes.axhline(0.0, color=_BOUND, linewidth=0.9, linestyle=(0, (5, 3)), alpha=0.8)
    axes.annotate(
        "proved", (0, 0), (4, -3), xycoords=("axes fraction", "data"), textcoords="offset points",
        va="top", fontsize=8, color=_BOUND,
    )  # fmt: skip
    axes.set_ylabel("worst lower bound - right-hand side", color=_BOUND)
    axes.tick_params(axis="y", colors=_BOUND)
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)


def _draw_domains(axes: Axes, seconds: Sequence[float], count: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.fill_between(seconds, count, step="post", color=_OPEN, alpha=0.15, linewidth=0)
    axes.plot(seconds, count, color=_OPEN, linewidth=1.0, drawstyle="steps-post")
    if max(count) >= _MANY:
        axes.set_yscale("symlog", linthresh=1.0)  # logarithmic, but with a place for 0
    else:
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylim(bottom=0, top=1.15 * max(count) + 1)
    axes.set_ylabel("open domains", color=_OPEN)
    axes.tick_params(axis="y", colors=_OPEN)
    axes.spines[["top", "left"]].set_visible(False)
