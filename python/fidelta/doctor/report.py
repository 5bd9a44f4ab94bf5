"""An Examination on a terminal."""

from rich.console import Group
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


def render(examination):
    """A rich renderable: layers, predictions, findings, verdict."""
    parts = [Text.from_markup(f"[bold]{escape(examination.path)}[/]  {examination.model_type}, {examination.tensors} tensors, "
                              f"{examination.nbytes / 1e6:.1f} MB" + (f", {examination.which_path}" if examination.which_path else ""))]
    if examination.layers:
        parts.append(_layers(examination.layers))
    parts += [_prediction(row) for row in examination.predictions]
    if examination.loss is not None:
        parts.append(Text(f"loss {examination.loss:.3f} nats a token (a uniform guess: {examination.loss_of_a_guess:.3f})"))
    parts += [_finding(f) for f in examination.findings]
    style = "bold green" if examination.healthy else "bold red"
    parts.append(Panel(Text(f"verdict: {examination.verdict}", style=style), expand=False))
    return Group(*parts)


def _layers(rows):
    table = Table(title="layers (over all prompts' tokens)", title_justify="left", pad_edge=False)
    for name in ("layer", "kind", "mixer mean", "std", "absmax", "residual mean", "std", "absmax", "state norm"):
        table.add_column(name, justify="left" if name == "kind" else "right", no_wrap=True)
    for row in rows:
        cells = [str(row["layer"]), row["kind"].replace("_attention", "")]
        for part in ("mixer", "residual"):
            cells += [f"{row[part][key]:.3g}" for key in ("mean", "std", "absmax")] if part in row else ["-"] * 3
        cells.append(f"{row['state_norm']:.3g}" if "state_norm" in row else "-")
        table.add_row(*cells)
    return table


def _shown(text, width=64):
    text = text.encode("unicode_escape", "replace").decode()
    return text if len(text) <= width else text[:width - 3] + "..."


def _number(value):
    return "-" if value is None else f"{value:.2f}"


def _prediction(row):
    top = "  ".join(f"{_shown(repr(t['text']), 12)} {t['p']:.2f}" for t in row["top5"])
    return Text(f"prompt        {_shown(row['prompt'])}\n"
                f"  perplexity  {_number(row['perplexity'])}   entropy ratio {row['entropy_ratio']:.3f}   next: {top}\n"
                f"  continues   {_shown(row['continuation'], 90)}")


def _finding(finding):
    told = finding.as_dict()
    body = f"[{COLOURS[finding.severity]}]{finding.severity}[/] [bold]{finding.code}[/] {escape(finding.where)}\n  {escape(finding.text)}"
    for key in ("cause", "mend", "verify"):
        body += f"\n  [dim]{key}:[/] {escape(told[key])}"
    return Text.from_markup(body)
