"""Draws docs/images/compare.svg: our kernel and two faulty ones, held against the float64 reference by fidelta.compare.

    python docs/make_images.py
"""

import re
from html import escape
from pathlib import Path

import ml_dtypes
import numpy as np

import fidelta

TOKENS, HEADS, WIDTH = 512, 8, 64


def inputs():
    r = np.random.default_rng(0)
    q, k = r.standard_normal((2, 1, TOKENS, 2, WIDTH)).astype(np.float32)
    v = r.standard_normal((1, TOKENS, HEADS, WIDTH)).astype(np.float32)
    g = -r.exponential(0.05, (1, TOKENS, HEADS)).astype(np.float32)
    beta = r.uniform(0, 1, (1, TOKENS, HEADS)).astype(np.float32)
    return dict(q=q, k=k, v=v, g=g, beta=beta, qk_l2norm=True)


def narrow_state(q, k, v, g, beta, **options):
    """The state goes through bfloat16 at every 64th token."""
    state, parts = None, []
    for first in range(0, TOKENS, 64):
        part = [x[:, first : first + 64] for x in (q, k, v, g, beta)]
        o, state = fidelta.gated_delta_rule(*part, initial_state=state, return_state=True, **options)
        state = state.astype(ml_dtypes.bfloat16).astype(np.float32)
        parts.append(o)
    return np.concatenate(parts, 1)


def late_gate(q, k, v, g, beta, **options):
    """From token 200 on, head 5 gets the gate of the token before."""
    g = g.copy()
    g[:, 201:, 5] = g[:, 200:-1, 5].copy()
    return fidelta.gated_delta_rule(q, k, v, g, beta, **options)


def picture(report):
    """The report's error maps one under the other, each with a line from its table."""
    maps = re.findall(r"<svg .*?</svg>", report._repr_html_(), re.S)
    top, parts = 0, []
    for (name, result), drawing in zip(report.results.items(), maps):
        difference = next(iter(result.outputs.values()))
        where = "none" if result.first is None else "token {token}, head {head}".format(**result.first)
        text = f"{name}: relative RMS {difference.rms:.1e}, first divergence: {where}"
        height = int(re.search(r"height='(\d+)'", drawing)[1])
        parts.append(f"<text x='0' y='{top + 16}' font-size='14'>{escape(text)}</text>")
        inside = drawing[drawing.index(">") + 1 : drawing.rindex("</svg>")]
        parts.append(f"<g transform='translate(0 {top + 22})'>{inside}</g>")
        top += height + 40
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='720' height='{top}' viewBox='-5 0 720 {top}' "
        f"font-family='sans-serif' color='#222'><rect x='-5' width='720' height='{top}' fill='white'/>"
        f"{''.join(parts)}</svg>\n"
    )


def main():
    implementations = {"fidelta": "fidelta", "state through bfloat16": narrow_state, "one head's gate is late": late_gate}
    report = fidelta.compare("gated_delta_rule", implementations, inputs(), repeat=1)
    print(report)
    target = Path(__file__).resolve().parent / "images" / "compare.svg"
    target.parent.mkdir(exist_ok=True)
    target.write_text(picture(report), encoding="utf-8")


if __name__ == "__main__":
    main()
