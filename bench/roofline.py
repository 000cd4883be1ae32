# SPDX-License-Identifier: Apache-2.0
"""Time over bytes on two logarithmic axes, with the memory's rate as the roof, as an SVG."""
import math

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 860, 520, 70, 220, 40, 60


def draw(target, title, x_label, y_label, series, floors, bytes_per_us):
    """series: [(label, colour, [(bytes, us, hint)])]; floors: [(bytes, us, hint)], drawn as dashes."""
    points = [p for _, _, some in series for p in some]
    x_low, x_high = min(p[0] for p in points) / 1.5, max(p[0] for p in points) * 1.5
    y_low = min(p[1] for p in floors or points) / 1.5
    y_high = max(p[1] for p in points) * 1.5

    def x(value):
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log(value / x_low) / math.log(x_high / x_low)

    def y(value):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(value / y_low) / math.log(y_high / y_low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', f'<text x="{LEFT}" y="22" font-size="15">{title}</text>']
    for power in range(5, 12):
        for step in (1, 3):
            value = step * 10 ** power
            if x_low < value < x_high:
                out.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e5e5e5"/>'
                           f'<text x="{x(value):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value / 1e6:g}</text>')
    for power in range(-1, 5):
        for step in (1, 2, 5):
            value = step * 10.0 ** power
            if y_low < value < y_high:
                out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e5e5e5"/>'
                           f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:g}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 16}" text-anchor="middle">{x_label}</text>')
    out.append(f'<text transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">{y_label}</text>')
    begin = max(x_low, y_low * bytes_per_us)
    out.append(f'<line x1="{x(begin):.1f}" y1="{y(begin / bytes_per_us):.1f}" x2="{x(x_high):.1f}" y2="{y(x_high / bytes_per_us):.1f}" '
               'stroke="#888" stroke-dasharray="5 4"/>')
    for size, us, hint in floors:
        out.append(f'<path d="M{x(size) - 5:.1f} {y(us):.1f}H{x(size) + 5:.1f}" stroke="#333" stroke-width="2"><title>{hint}</title></path>')
    for _, colour, some in series:
        for size, us, hint in some:
            out.append(f'<circle cx="{x(size):.1f}" cy="{y(us):.1f}" r="4.5" fill="{colour}" fill-opacity="0.8"><title>{hint}</title></circle>')
    legend = [(label, f'<circle cx="0" cy="-4" r="4.5" fill="{colour}"/>') for label, colour, _ in series]
    if floors:
        legend.append(("read-only kernel, same run", '<path d="M-5 -4H5" stroke="#333" stroke-width="2"/>'))
    legend.append((f"{bytes_per_us / 1e6:.2f} TB/s", '<path d="M-7 -4H7" stroke="#888" stroke-dasharray="5 4"/>'))
    for i, (label, mark) in enumerate(legend):
        out.append(f'<g transform="translate({WIDTH - RIGHT + 24} {TOP + 20 + 22 * i})">{mark}<text x="14">{label}</text></g>')
    out.append("</svg>")
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")
