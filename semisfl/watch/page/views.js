"use strict";
// Views of several runs: each makes its elements once, and fills them whenever there is something new.
Watch.severalRuns = (() => {
  const { el, format, charts, table, data } = Watch;
  const { card, badge, tiles, fill, hidden, signature } = Watch.parts;

  // Positions on an axis, null where a file does not say: the sum of a metric is unknown from there on.
  function positions({ key, scale, first, summed }, columns) {
    let total = 0;
    const add = (value) => (total = value == null || total == null ? null : total + value);
    return (columns[key] || []).map((value) => {
      const place = summed ? add(value) : value;
      return place == null ? null : place * scale + first;
    });
  }

  // --- which runs are drawn, and how ---------------------------------------------------------------

  function drawable() {
    return data.listing.runs
      .filter((run) => !hidden.has(run.id) && data.rounds[run.id])
      .map((run) => ({ run, columns: data.rounds[run.id].columns }));
  }

  // Where one run is drawn the parts of a chart tell its lines apart, else the runs do.
  function lineOf({ run, columns }, key, axis, { scale = 1, dash = 0, part = "", alone = false } = {}) {
    return {
      name: run.name + (part && `, ${part}`), series: run.colour, dash,
      end: alone && part ? part : dash ? "" : run.name,
      x: positions(axis, columns), y: (columns[key] || []).map((value) => (value == null ? null : value * scale)),
    };
  }

  function legendOf(node) {
    charts.legend(node, drawable().map(({ run }) => ({ name: run.name, series: run.colour })));
  }

  // When the first accuracy will be there.
  function firstTest(runs) {
    const active = runs.filter((run) => run.active);
    if (!active.length) return "no round was tested";
    const { run, left } = active.map((run) => ({ run, left: run.first_test - run.done }))
      .sort((one, other) => one.left - other.left)[0];
    const seconds = run.done ? `, in about ${format.time((run.seconds / run.done) * left)}` : "";
    return `The first accuracy comes with round ${run.first_test}${seconds}. ${waits(run)}`;
  }

  const waits = (run) => (run.state === "running" ? "" : `Now: ${run.note}.`);

  // --- overview -------------------------------------------------------------------------------------

  function overview(panel) {
    const { axes } = data.listing;
    let axis = axes[0];
    const numbers = tiles();
    const chart = el("div", { class: "chart tall" });
    const legend = el("ul", { class: "legend" });
    const choices = axes.map((one) => el("button", {
      type: "button", "aria-pressed": String(one === axis),
      onclick(event) {
        axis = one;
        choices.forEach((one) => one.setAttribute("aria-pressed", String(one === event.target)));
        draw();
      },
    }, one.title));
    const runs = table({
      caption: "Click a run to see its clients.", sort: ["name", 1], cards: true,
      columns: [
        { key: "drawn", title: "Drawn", sort: (run) => Number(!hidden.has(run.id)), show: tick },
        { key: "name", title: "Run", wrap: true, show: (run) => el("a", { href: Watch.link("clients", run.id), title: run.path }, run.name) },
        { key: "title", title: "Method", wrap: true, wide: true },
        { key: "differs", title: "Differs in", wrap: true, wide: true, optional: true },
        { key: "state", title: "State", show: (run) => badge(run.state, run.note) },
        { key: "done", title: "Rounds", number: true, show: progress },
        { key: "accuracy", title: "Accuracy", number: true, show: (run) => format.percent(run.accuracy) },
        { key: "best", title: "Best", number: true, show: (run) => format.percent(run.best) },
        { key: "bytes", title: "Sent", number: true, wide: true, show: (run) => format.bytes(run.bytes) },
        { key: "seconds", title: "Time", number: true, wide: true, show: (run) => format.time(run.seconds) },
      ],
    });
    const accuracy = card("", null, chart, legend);
    accuracy.firstChild.append(el("div", { class: "choice", role: "group", "aria-label": "Accuracy over" }, choices));
    const problems = el("ul", { class: "log" });
    const warnings = card("Warnings", null, problems);
    warnings.setAttribute("role", "alert");
    panel.append(el("div", { class: "stack" }, warnings, numbers, accuracy, card("Runs", null, runs.node)));

    function tick(run) {
      return el("input", {
        type: "checkbox", checked: !hidden.has(run.id), "aria-label": `draw ${run.name}`,
        onchange(event) { hidden[event.target.checked ? "delete" : "add"](run.id); draw(); },
      });
    }

    function progress(run) {
      const bar = el("progress", { max: Math.max(1, run.rounds), value: run.done, "aria-label": "rounds done" });
      return el("span", {}, `${run.done} / ${run.rounds} `, bar);
    }

    let before = "";
    function draw() {
      if (before === (before = signature(axis.title))) return;
      const lines = drawable().map((one) => lineOf(one, "accuracy", axis));
      const kinds = [...new Set(data.listing.runs.map((run) => run.judged_on))];
      const title = kinds.length > 1 ? "Accuracy" : kinds[0] === "validation" ? "Validation accuracy" : "Test accuracy";
      accuracy.querySelector("h2").textContent = title;
      const shown = drawable().map(({ run }) => run);
      const chances = [...new Set(shown.map((run) => run.chance).filter((chance) => chance))];
      const levels = chances.map((chance) => ({ y: chance, text: `guessing: ${Number(chance.toPrecision(3))} %` }));
      charts.lines(chart, lines, axis.title, "accuracy, %", { title, zero: true, levels, empty: firstTest(shown) });
      legendOf(legend);
    }

    function numbersOf(all) {
      if (all.length === 1) return single(all[0]);
      const best = all.filter((run) => run.best != null).sort((one, other) => other.best - one.best)[0];
      const count = (state) => all.filter((run) => run.state === state).length;
      const pairs = [["Runs", String(all.length)], ["Running", String(count("running"))], ["Finished", String(count("finished"))]];
      if (count("waiting")) pairs.push(["Waiting", String(count("waiting"))]);
      if (count("crashed")) pairs.push(["Crashed", String(count("crashed"))]);
      if (best) pairs.push(["Best accuracy", format.percent(best.best), best.name]);
      pairs.push(["Sent", format.bytes(all.reduce((sum, run) => sum + run.bytes, 0))]);
      return pairs;
    }

    function single(run) {
      const pairs = [
        ["State", badge(run.state, run.note), run.state === "waiting" ? run.note : null],
        ["Rounds", String(run.done), `of ${run.rounds}`],
        ["Accuracy", format.percent(run.accuracy)],
        ["Best", format.percent(run.best)],
        ["Sent", format.bytes(run.bytes)],
        ["Time", format.time(run.seconds)],
      ];
      if (run.active && run.done) {
        pairs.push(["Left, at most", format.time((run.seconds / run.done) * (run.rounds - run.done))]);
      }
      return pairs;
    }

    return () => {
      const all = data.listing.runs;
      fill(numbers, numbersOf(all));
      runs.update(all.map((run) => ({ ...run, differs: run.differs || null })));
      const wrong = all.filter((run) => run.problem);
      warnings.hidden = !wrong.length;
      const texts = wrong.map((run) => `${run.name}: ${run.problem}`);
      if (problems.dataset.texts !== (problems.dataset.texts = JSON.stringify(texts))) { // or it is read out again
        problems.replaceChildren(...texts.map((text) => el("li", { class: "WARNING" }, text)));
      }
      draw();
    };
  }

  // --- training -------------------------------------------------------------------------------------

  const DASHES = ["solid", "dotted", "dashed", "dash-dotted"];

  // Which panels there are comes with the runs: a method may have metrics of its own.
  function training(panel) {
    const legend = el("ul", { class: "legend" });
    const grid = el("div", { class: "grid" });
    const empty = el("p", { class: "message" });
    panel.append(el("div", { class: "stack" }, legend, empty, grid));
    let panels = [];
    let made = "";

    function make() {
      panels = data.listing.panels.map((one) => {
        const chart = el("div", { class: "chart" });
        const about = one.lines.length > 1
          ? one.lines.map(({ name }, place) => `${DASHES[place % 4]}: ${name || "all"}`).join(" · ") : null;
        return { ...one, chart, node: card(one.title, about, chart) };
      });
      grid.replaceChildren(...panels.map((one) => one.node));
    }

    let before = "";
    return () => {
      if (made !== (made = JSON.stringify(data.listing.panels))) make();
      const shown = drawable();
      const active = shown.find(({ run }) => run.active);
      empty.hidden = shown.some(({ columns }) => columns.round.length);
      empty.textContent = active ? `The first numbers come when round 1 is complete. ${waits(active.run)}` : "No round was finished.";
      if (before === (before = signature(made))) return;
      legendOf(legend);
      for (const { title, unit, scale, lines, chart, node } of panels) {
        node.hidden = !shown.some(({ columns }) => lines.some(({ key }) => (columns[key] || []).some((value) => value != null)));
        if (node.hidden) continue;
        const drawn = lines.flatMap(({ key, name }, place) => shown.map((one) =>
          lineOf(one, key, data.listing.axes[0], { scale, dash: place % 4, part: name, alone: shown.length === 1 })));
        charts.lines(chart, drawn, data.listing.axes[0].title, unit || title.toLowerCase(), { title, zero: true });
      }
    };
  }

  return [
    { key: "overview", title: "Overview", make: overview, rounds: true },
    { key: "training", title: "Training", make: training, rounds: true },
  ];
})();
