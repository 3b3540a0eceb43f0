"use strict";
// Lines and maps. Colours are those of page.css, read when drawn, so that light and dark both work.
Watch.charts = (() => {
  const { el, plain } = Watch;
  const MOST_POINTS = 1200;
  const SERIES = 8;
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

  function react(node, traces, wanted, said) {
    drawn.set(node, () => react(node, traces, wanted, said));
    node.setAttribute("role", "img");
    node.setAttribute("aria-label", said);
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

  // lines: [{name, series, dash, x, y}]; what has no value is not drawn.
  function lines(node, list, x, y, options = {}) {
    const known = list
      .map((line) => ({ ...line, points: thin(line.x, line.y) }))
      .filter((line) => line.points[0].length);
    const said = known.length
      ? `${options.title || y} over ${x}. ` + known.slice(0, 12)
          .map((line) => `${line.name}: ${Number(line.points[1].at(-1).toPrecision(4))} at the end`).join("; ")
      : `${options.title || y}: not measured`;
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
        if (!known.length) chosen.annotations = [nothing(paint)];
      },
    }, said);
    return known.length > 0;
  }

  const nothing = (paint) => ({
    text: "not measured", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5,
    font: { color: paint("quiet") },
  });

  const short = (name) => (name.length > 18 ? `${name.slice(0, 17)}…` : name);

  // rows by columns of numbers, null where there is none
  function map(node, grid, columns, rows, x, y, unit, said) {
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
        const fitting = Math.max(3, Math.floor((node.clientWidth - 180) / 48));
        Object.assign(chosen.xaxis, { type: "category", showgrid: false, tickangle: 0, ...some(columns, fitting) });
        Object.assign(chosen.yaxis, { type: "category", showgrid: false, autorange: "reversed", ...some(rows, 16) });
      },
    }, said);
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
