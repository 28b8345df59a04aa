"""The HTML report: one file without outside parts, that can be mailed or archived with the run."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from modicum.report.colours import colour_of
from modicum.report.inline import drawn, page
from modicum.report.summary import Summary, traffic_line
from modicum.report.table import head, number, percent, rows
from modicum.report.view import RunView, bands_of

if TYPE_CHECKING:
    from modicum.federation.records import RoundRecord
    from modicum.privacy.certificate import Certificate


def run_page(
    summary: Summary,
    certificate: Certificate,
    records: Sequence[RoundRecord],
    picture: bytes | None,
    config: str,
) -> str:
    """The report of one run."""
    return page(
        f"{summary.method} on {summary.dataset}",
        [
            _lead(summary),
            _simulated([summary]),
            drawn(run_data(summary, certificate, records), "runReport", picture_part(picture)),
            "<h2>Result</h2>" + _table([summary]),
            "<h2>What is guaranteed</h2>" + guarantees(certificate),
            _audit(certificate),
            "<h2>What was paid</h2>" + _paid(summary, records),
            _travelled(summary),
            _impossible(records),
            f"<details><summary>Settings</summary><pre>{escape(config)}</pre></details>",
        ],
    )


def run_data(summary: Summary, certificate: Certificate, records: Sequence[RoundRecord]) -> dict[str, Any]:
    """What a page draws of a finished run, as plain values."""
    budgets = {name: line.budget for name, line in certificate.clients.items()}
    about = summary.to_dict()
    groups = about.pop("groups")
    about |= {"main": summary.main, "score": summary.score}
    about |= {"colour": colour_of(summary.method), "clipped": summary.bound is not None, "state": "finished"}
    return {"about": about, "groups": groups, **RunView(budgets).take(records).to_dict()}


def comparison_page(
    title: str,
    summaries: Sequence[Summary],
    picture: bytes | None,
    lines: Sequence[str],
    records: Mapping[str, Sequence[Sequence[RoundRecord]]],
) -> str:
    """Several runs side by side; `lines` are closing remarks, such as what was verified."""
    remarks = "".join(f"<p>{escape(line)}</p>" for line in lines)
    unclipped = [summary.method for summary in summaries if summary.bound is None]
    charts = drawn(bands_of(records, unclipped), "compareCharts", picture_part(picture))
    return page(title, [_simulated(summaries), charts, _table(summaries), remarks])


def _lead(summary: Summary) -> str:
    ended = "" if summary.rounds == summary.rounds_planned else f" of {summary.rounds_planned} planned"
    gone = f", {summary.retired} of them retired before the end" if summary.retired else ""
    text = (
        f"{summary.clients} clients{gone}; model {summary.model}; {summary.rounds} rounds{ended}; seed "
        f"{summary.seed}; run {summary.run}. {summary.note}"
    )
    return f'<p class="quiet">{escape(text)}</p>'


def _simulated(summaries: Sequence[Summary]) -> str:
    first = summaries[0]
    return simulated_part(known=first.score is not None, simulation=first.simulation)


def simulated_part(*, known: bool, simulation: bool) -> str:
    """Whether there is an accuracy, who can see it, and whether the noise was real."""
    protects = " Noise came from a seed, so this run protects nobody: its ε is that of the same run deployed."
    if not known:
        text = "<b>No accuracy.</b> Nobody in this run holds test records that could be looked at for free."
        kind = "simulated" if simulation else "quiet"
        return f'<p class="{kind}">{text}{protects if simulation else ""}</p>'
    text = (
        "<b>Simulated ground truth.</b> Test figures come from data that only a simulator can see. They cost no "
        "privacy because they left no client, and no policy could read them. A deployment would not have them."
    )
    return f'<p class="simulated">{text}{protects if simulation else ""}</p>'


def _table(summaries: Sequence[Summary]) -> str:
    """One line a budget group; columns of accuracy only where somebody can know one."""
    lines = [row for summary in summaries for row in rows(summary)]
    columns = head(summaries)
    known = [i for i, name in enumerate(columns) if not name.endswith("*") or _tells(lines, i)]
    top = "".join(f'<th scope="col">{escape(columns[i])}</th>' for i in known)
    body = "".join("<tr>" + "".join(f"<td>{escape(row[i])}</td>" for i in known) + "</tr>" for row in lines)
    seen = any(columns[i].endswith("*") for i in known)
    main, second = (name.removesuffix("*") for name in columns[1:3])
    simulated = (
        f"* simulated. First {main} and {second}: all test data; second {main}: mean over the group's clients, "
        "each on its own test records. "
    )
    return (
        f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
        f'<p class="note-line">{simulated if seen else ""}ε certified is min / median / max where clients of a '
        "group differ.</p>"
    )


def _tells(lines: Sequence[Sequence[str]], column: int) -> bool:
    return any(line[column] not in ("", "–") for line in lines)


def picture_part(picture: bytes | None) -> str:
    """A picture inside the page, or why there is none."""
    if picture is None:
        return '<p class="quiet">No picture: matplotlib is not installed (pip install matplotlib).</p>'
    data = base64.b64encode(picture).decode()
    return f'<img alt="The run by rounds" src="data:image/png;base64,{data}">'


def guarantees(certificate: Certificate) -> str:
    """The certificate's own sentences: each distinct promise with those it is made to, then what it rests on."""
    promised: dict[str, list[str]] = {}
    for name, line in certificate.clients.items():
        promised.setdefault(line.meaning, []).append(name)
    promises = "".join(
        f"<li>{escape(text)} <span class='quiet'>({escape(_names(who))})</span></li>"
        for text, who in promised.items()
    )
    promises += _persons(certificate)
    rests = "".join(f"<li>{escape(text)}</li>" for text in certificate.assumptions)
    account = escape(str(certificate.account["sentence"]))
    return (
        f"<ul>{promises}</ul><p>{account}</p><p>This rests on:</p><ul>{rests}</ul>"
        f"<p class='quiet'>Ledger head {escape(certificate.head)}, {certificate.entries} entries. "
        "Recompute it with <code>modicum verify</code> on this folder.</p>"
    )


def _persons(certificate: Certificate) -> str:
    """What the weakest record-level promise is worth to a person with several records at one client (R18)."""
    stated = [line.groups for line in certificate.clients.values() if line.groups]
    if not stated:
        return ""
    worst = {size: max(math.inf if g[size] is None else float(g[size] or 0) for g in stated) for size in stated[0]}
    said = ", ".join(
        f"{size} records: {'none known' if math.isinf(e) else f'ε = {e:g}'}" for size, e in worst.items()
    )
    return f"<li>A person with up to so many records at one client, at the same δ: {said}.</li>"


def _travelled(summary: Summary) -> str:
    """Seconds and bytes of a round, and the rounds that had no sum."""
    line = traffic_line(summary.traffic)
    told = f"<p>{escape(line.capitalize())} (medians; the largest silo's bytes).</p>" if line else ""
    lines = "".join(f"<li>{escape(text)}</li>" for text in summary.void)
    none = f"<p>Void rounds, which stay charged:</p><ul>{lines}</ul>" if lines else ""
    return f"<h2>What travelled</h2>{told}{none}" if told or none else ""


def _audit(certificate: Certificate) -> str:
    """What was measured beside the guarantee; nothing where no audit was asked for."""
    found = certificate.audit
    if found is None:
        return ""
    proved = f"{'ε ≈' if found['estimate'] else 'ε ≥'} {found['epsilon_lower']:.2f}"
    sure = "an estimate" if found["estimate"] else f"wrong with probability {found['beta']:g}"
    claim = "nothing is claimed" if found["claimed"] is None else f"claimed was ε = {found['claimed']:.3g}"
    text = (
        f"The audit {found['method']} played this experiment once more with {found['canaries']} canaries and "
        f"found {proved} ({sure}); {claim}. {found['note']} An audit proves leaks, never their absence."
    )
    verdict = "<p><b>More was proved than is claimed: do not use this.</b></p>" if found["broken"] else ""
    return f"<h2>What was measured</h2>{verdict}<p>{escape(text)}</p>"


def _impossible(records: Sequence[RoundRecord]) -> str:
    """Who sent what no honest client can have sent, and when first; nothing where nobody did."""
    first: dict[str, tuple[int, str]] = {}
    count: dict[str, int] = {}
    for record in records:
        for name, why in record.impossible.items():
            first.setdefault(name, (record.round, why))
            count[name] = count.get(name, 0) + 1
    items = (
        f"{name}: in {count[name]} of {len(records)} rounds; first in round {round}: {why}"
        for name, (round, why) in first.items()
    )
    lines = "".join(f"<li>{escape(item)}</li>" for item in items)
    return f"<h2>Answers that counted as absent</h2><ul>{lines}</ul>" if lines else ""


def _names(who: Sequence[str]) -> str:
    return ", ".join(who) if len(who) <= 4 else f"{who[0]}, {who[1]}, … {len(who)} clients"


def _paid(summary: Summary, records: Sequence[RoundRecord]) -> str:
    items = []
    for group in summary.groups:
        planned = "" if group.releases_planned is None else f" of {group.releases_planned:,} planned"
        made = f"{group.clients} clients made {group.releases_made:,}{planned} releases"
        items.append(f"ε granted {number(group.budget)}: {made}")
    reserved = f"{percent(records[-1].reserved)} of what was planned is reserved." if records else ""
    items.append(f"{reserved} The ε above is that of the whole plan: it holds however much of it was used.")
    items += [
        f"Metric {name}, released with noise and charged: {value:.3f}"
        + (f" ± {summary.noise[name]:.3f} (standard deviation of its noise)" if name in summary.noise else "")
        for name, value in summary.released.items()
    ]
    if summary.claimed is not None:
        items.append(f"The paper's own accountant claims ε = {number(summary.claimed)}, which is not what holds.")
    items += [f"{name} on public proxy data, free: {value:.3f}" for name, value in summary.public.items()]
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"
