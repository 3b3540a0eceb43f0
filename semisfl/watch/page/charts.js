"use strict";
// Lines and maps. Colours are those of page.css, read when drawn, so that light and dark both work.
Watch.charts = (() => {
  const { el, plain } = Watch;
  const MOST_POINTS = 1200;
  const SERIES = 8;
  const LABEL_HEIGHT = 15;
  const DASHES = ["solid", "dot", "dash", "dashdot"];
  const drawn = new Map();

  const colour = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  function layout(x, y, more) {
    const axis = {
      gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true,
      tickfont: { size: 12 }, ticks: "", title: { font: { size: 12 }, standoff: 8 },
    };
    return {
      font: { family: "system-ui, sans-serif", size: 13, color: colour("quiet") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      margin: { l: 8, r: 12, t: 8, b: 8 }, showlegend: false, hovermode: "closest", dragmode: false,
      hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: colour("ink") } },
      xaxis: { ...axis, title: { ...axis.title, text: plain(x) } },
      yaxis: { ...axis, title: { ...axis.title, text: plain(y) } },
      ...more,
    };
  }

  function react(node, traces, wanted, description) {
    drawn.set(node, () => react(node, traces, wanted, description));
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", description);
    const { x, y, adjust } = wanted;
    const chosen = layout(x, y);
    if (adjust) adjust(chosen, colour);
    const made = typeof traces === "function" ? traces(colour) : traces;
    Plotly.react(node, made, chosen, { displayModeBar: false, responsive: true, doubleClick: false });
    // While its view was closed the window may have changed.
    if (node._fullLayout && node.clientWidth && node._fullLayout.width !== node.clientWidth) Plotly.Plots.resize(node);
  }

  // Every so-manyth point and the last: a screen has no more columns.
  function thin(x, y) {
    const points = x.map((value, place) => [value, y[place]]).filter(([a, b]) => a != null && b != null);
    const every = Math.ceil(points.length / MOST_POINTS);
    const kept = points.filter((_, place) => place % every === 0 || place === points.length - 1);
    return [kept.map((point) => point[0]), kept.map((point) => point[1])];
  }

  const short = (name, most = 18) => (name.length > most ? `${name.slice(0, most - 1)}…` : name);

  // A name at the end of each line and the text of each level, none over another: one per colour, at its highest end.
  function ends(node, known, levels) {
    const byColour = new Map();
    for (const line of known.filter((one) => one.end)) {
      const [x, y] = line.points.map((values) => values.at(-1));
      const before = byColour.get(`${line.series}/${line.dash}`) || { count: 0, y: -Infinity };
      byColour.set(`${line.series}/${line.dash}`, {
        ...(y > before.y ? { x, y, series: line.series, name: line.end } : before), count: before.count + 1,
      });
    }
    const most = node.clientWidth < 500 ? 14 : 26;
    const names = [...byColour.values()].map((one) => (
      { ...one, text: short(one.name, most) + (one.count > 1 ? `, ${one.count - 1} more` : "") }));
    const values = [...known.flatMap((line) => line.points[1]), ...levels.map((level) => level.y)];
    const [low, high] = [Math.min(0, ...values), Math.max(...values)];
    const height = Math.max(60, node.clientHeight - 60);
    const above = levels.map((level) => ({ ...level, level: true, shift: LABEL_HEIGHT / 2 }));
    const labels = names.length + levels.length > height / LABEL_HEIGHT ? above : [...above, ...names];
    for (const label of labels) {
      label.at = high > low ? ((label.y - low) / (1.05 * (high - low))) * height : 0;
    }
    labels.sort((one, other) => other.at + (other.shift || 0) - one.at - (one.shift || 0));
    let free = Infinity; // downwards, the highest place that no label takes yet
    for (const label of labels) {
      label.place = Math.min(label.at + (label.shift || 0), free);
      free = label.place - LABEL_HEIGHT;
    }
    let floor = 0; // and up again, what fell out at the bottom
    for (const label of labels.reverse()) {
      label.place = Math.max(label.place, floor);
      floor = label.place + LABEL_HEIGHT;
    }
    return labels.map((label) => ({ ...label, shift: label.place - label.at }));
  }

  // lines: [{name, series, dash, x, y, end}]; what has no value is not drawn. ``end`` is written where it ends.
  // options: title; zero, the axis begins there; empty, shown in place of lines; levels, [{y, text}] to compare with.
  function lines(node, list, x, y, options = {}) {
    const known = list
      .map((line) => ({ ...line, points: thin(line.x, line.y) }))
      .filter((line) => line.points[0].length);
    const description = known.length
      ? `${options.title || y} over ${x}. ` + known.slice(0, 12)
          .map((line) => `${line.name}: ${Number(line.points[1].at(-1).toPrecision(4))} at the end`).join("; ")
      : `${options.title || y}: ${options.empty || "not measured"}`;
    const levels = known.length ? options.levels || [] : [];
    const traces = (paint) => known.map((line) => ({
      type: "scatter", mode: line.points[0].length < 3 ? "lines+markers" : "lines",
      x: line.points[0], y: line.points[1], name: plain(line.name),
      line: { color: paint(`series-${line.series % SERIES}`), width: 1.8, dash: DASHES[line.dash || 0] },
      hovertemplate: `${plain(line.name)}<br>${plain(x)} %{x:,.4~g}<br>${plain(y)} %{y:.4~g}<extra></extra>`,
    }));
    react(node, traces, {
      x, y,
      adjust(chosen, paint) {
        if (options.zero) chosen.yaxis.rangemode = "tozero";
        const labels = ends(node, known, levels);
        chosen.shapes = levels.map((level) => ({
          type: "line", xref: "paper", x0: 0, x1: 1, y0: level.y, y1: level.y,
          line: { color: paint("quiet"), width: 1, dash: "dot" },
        }));
        chosen.annotations = [
          ...labels.filter((label) => !label.level).map((label) => ({
            text: plain(label.text), x: label.x, y: label.y, xanchor: "left", xshift: 5, yshift: label.shift,
            showarrow: false, font: { size: 12, color: paint(`series-${label.series % SERIES}`) },
          })),
          ...labels.filter((label) => label.level).map((level) => ({
            text: plain(level.text), xref: "paper", x: 1, y: level.y, xanchor: "right", yshift: level.shift, showarrow: false,
            font: { size: 11, color: paint("quiet") },
          })),
          ...(known.length ? [] : [nothing(paint, options.empty || "not measured", node.clientWidth)]),
        ];
      },
    }, levels.reduce((text, level) => `${text}; ${level.text}`, description));
    return known.length > 0;
  }

  const nothing = (paint, text, width) => ({
    text: plain(text), width: Math.max(120, width - 90), showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
    font: { color: paint("quiet") },
  });

  // rows by columns of numbers, null where there is none
  function map(node, grid, columns, rows, x, y, unit, description) {
    const traces = (paint) => [{
      type: "heatmap", z: grid, zmin: 0, ...(unit === "%" ? { zmax: 100 } : {}), x: columns.map(plain), y: rows.map(plain), xgap: columns.length > 80 ? 0 : 1,
      ygap: rows.length > 80 ? 0 : 1, hoverongaps: false,
      colorscale: [0, 1, 2, 3].map((step) => [step / 3, paint(`heat-${step}`)]),
      hovertemplate: `${plain(x)} %{x}<br>${plain(y)} %{y}<br>%{z:,.4~g} ${plain(unit)}<extra></extra>`,
      colorbar: { thickness: 9, outlinewidth: 0, len: 0.9, tickfont: { size: 11 }, title: { text: plain(unit), font: { size: 11 } } },
    }];
    react(node, traces, {
      x, y,
      adjust(chosen) {
        // By name: a number would be taken for the category that is called so.
        const some = (names, most) => {
          const kept = names.filter((_, place) => place % Math.ceil(names.length / most) === 0);
          return { tickvals: kept.map(plain), ticktext: kept.map((name) => plain(short(name))) };
        };
        const slanted = columns.some((name) => name.length > 6);
        const fitting = Math.max(3, Math.floor((node.clientWidth - 180) / (slanted ? 24 : 48)));
        Object.assign(chosen.xaxis, { type: "category", showgrid: false, tickangle: slanted ? -45 : 0, ...some(columns, fitting) });
        Object.assign(chosen.yaxis, { type: "category", showgrid: false, autorange: "reversed", ...some(rows, 16) });
      },
    }, description);
  }

  function legend(node, entries) {
    node.replaceChildren(...entries.map(({ name, series }) =>
      el("li", {}, el("span", { class: `swatch s${series % SERIES}`, "aria-hidden": "true" }), name)));
  }

  function repaint() {
    for (const [node, draw] of drawn) {
      if (node.isConnected && node.offsetParent) draw();
    }
  }

  return { lines, map, legend, repaint };
})();
