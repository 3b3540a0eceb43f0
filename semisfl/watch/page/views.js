"use strict";
// Views of several runs: each makes its elements once, and fills them whenever there is something new.
Watch.severalRuns = (() => {
  const { el, words, charts, table, data } = Watch;
  const { card, badge, tiles, fill, hidden, signature } = Watch.parts;
  const AXES = {
    round: { title: "rounds", x: (columns) => columns.round.map((round) => round + 1) },
    gigabytes: { title: "GB sent", x: (columns) => columns.bytes_total.map((size) => (size == null ? null : size / 1e9)) },
    seconds: { title: "minutes", x: (columns) => summed(columns.seconds).map((time) => (time == null ? null : time / 60)) },
  };

  // Older files may not say how long a round took: from there on nobody knows.
  function summed(values) {
    let total = 0;
    return values.map((value) => (total = value == null || total == null ? null : total + value));
  }

  // --- which runs are drawn, and how ---------------------------------------------------------------

  const groups = () => [...new Set(data.listing.runs.map((run) => run.label))];

  function drawable() {
    const labels = groups();
    return data.listing.runs
      .filter((run) => !hidden.has(run.id) && data.rounds[run.id])
      .map((run) => ({ run, series: labels.indexOf(run.label), columns: data.rounds[run.id].columns }));
  }

  function lineOf({ run, series, columns }, key, axis, scale = 1, dash = 0, suffix = "") {
    const seeds = data.listing.runs.filter((other) => other.label === run.label).length;
    return {
      name: run.label + (seeds > 1 ? ` seed ${run.seed}` : "") + suffix, series, dash,
      x: AXES[axis].x(columns), y: (columns[key] || []).map((value) => (value == null ? null : value * scale)),
    };
  }

  function legendOf(node) {
    const labels = groups();
    const used = labels.filter((label) => drawable().some(({ run }) => run.label === label));
    charts.legend(node, used.map((name) => ({ name, series: labels.indexOf(name) })));
  }

  // --- overview -------------------------------------------------------------------------------------

  function overview(panel) {
    let axis = "round";
    const numbers = tiles();
    const chart = el("div", { class: "chart tall" });
    const legend = el("ul", { class: "legend" });
    const choices = Object.entries(AXES).map(([key, { title }]) => el("button", {
      type: "button", "aria-pressed": String(key === axis),
      onclick(event) {
        axis = key;
        choices.forEach((one) => one.setAttribute("aria-pressed", String(one === event.target)));
        draw();
      },
    }, title));
    const runs = table({
      caption: "A run's name leads to its clients.", sort: ["name", 1],
      columns: [
        { key: "drawn", title: "Drawn", sort: (run) => Number(!hidden.has(run.id)), show: tick },
        { key: "name", title: "Run", wrap: true, show: (run) => el("a", { href: `#clients/${run.id}`, title: run.path }, run.name) },
        { key: "label", title: "Method", wrap: true },
        { key: "state", title: "State", show: (run) => badge(run.state, run.note) },
        { key: "done", title: "Rounds", number: true, show: progress },
        { key: "accuracy", title: "Accuracy", number: true, show: (run) => words.percent(run.accuracy) },
        { key: "best", title: "Best", number: true, show: (run) => words.percent(run.best) },
        { key: "bytes", title: "Sent", number: true, show: (run) => words.bytes(run.bytes) },
        { key: "seconds", title: "Time", number: true, show: (run) => words.time(run.seconds) },
      ],
    });
    const accuracy = card("", null, chart, legend);
    accuracy.firstChild.append(el("div", { class: "choice", role: "group", "aria-label": "Accuracy over" }, choices));
    const problems = el("ul", { class: "log" });
    panel.append(el("div", { class: "stack" }, numbers, accuracy, card("Runs", null, runs.node, problems)));

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
      if (before === (before = signature(axis))) return;
      const lines = drawable().map((one) => lineOf(one, "accuracy", axis));
      const kinds = [...new Set(data.listing.runs.map((run) => run.judged_on))];
      const title = kinds.length > 1 ? "Accuracy" : kinds[0] === "validation" ? "Validation accuracy" : "Test accuracy";
      accuracy.querySelector("h2").textContent = title;
      charts.lines(chart, lines, AXES[axis].title, "accuracy, %", { title });
      legendOf(legend);
    }

    function numbersOf(all) {
      if (all.length === 1) return single(all[0]);
      const best = all.filter((run) => run.best != null).sort((one, other) => other.best - one.best)[0];
      const count = (state) => all.filter((run) => run.state === state).length;
      const pairs = [["Runs", String(all.length)], ["Running", String(count("running"))], ["Finished", String(count("finished"))]];
      if (count("crashed")) pairs.push(["Crashed", String(count("crashed"))]);
      if (best) pairs.push(["Best accuracy", words.percent(best.best), best.name]);
      pairs.push(["Sent", words.bytes(all.reduce((sum, run) => sum + run.bytes, 0))]);
      return pairs;
    }

    function single(run) {
      const pairs = [
        ["State", badge(run.state, run.note)],
        ["Rounds", String(run.done), `of ${run.rounds}`],
        ["Accuracy", words.percent(run.accuracy)],
        ["Best", words.percent(run.best)],
        ["Sent", words.bytes(run.bytes)],
        ["Time", words.time(run.seconds)],
      ];
      if (run.state === "running" && run.done) {
        pairs.push(["Left, at most", words.time((run.seconds / run.done) * (run.rounds - run.done))]);
      }
      return pairs;
    }

    return () => {
      const all = data.listing.runs;
      fill(numbers, numbersOf(all));
      runs.update(all);
      problems.replaceChildren(...all.filter((run) => run.problem).map((run) =>
        el("li", { class: "WARNING" }, `${run.name}: ${run.problem}`)));
      draw();
    };
  }

  // --- training -------------------------------------------------------------------------------------

  const PANELS = [
    ["Loss on labelled images", "nats", [["loss_supervised", ""], ["loss_supervised_contrast", ", contrastive part"]]],
    ["Loss on unlabelled images", "nats", [["loss_semi", ""], ["loss_consistency", ", consistency"], ["loss_clustering", ", clustering"]]],
    ["Supervised steps per round, Kₛ", "steps", [["supervised_steps", ""]]],
    ["Mask rate: pseudo-labels not kept", "%", [["mask_rate", "", 100]]],
    ["Impurity: kept labels that are wrong", "%", [["impurity", "", 100]]],
    ["Clients that contributed", "clients", [["contributing", ""]]],
    ["Sent since the start", "GB", [["bytes_total", "", 1e-9]]],
    ["Seconds per round", "s", [["seconds", ""], ["seconds_training", ", training"], ["seconds_testing", ", test"]]],
    ["Learning rate", "", [["learning_rate", ""]]],
  ];

  function training(panel) {
    const legend = el("ul", { class: "legend" });
    const panels = PANELS.map(([title, unit, keys]) => {
      const chart = el("div", { class: "chart" });
      const parts = keys.length > 1 ? keys.map(([, name], place) => `${["solid", "dotted", "dashed"][place]}: ${name ? name.slice(2) : "all"}`).join(" · ") : null;
      return { title, unit, keys, chart, node: card(title, parts, chart) };
    });
    panel.append(el("div", { class: "stack" }, legend, el("div", { class: "grid" }, panels.map((one) => one.node))));
    let before = "";
    return () => {
      if (before === (before = signature())) return;
      legendOf(legend);
      for (const { title, unit, keys, chart, node } of panels) {
        node.hidden = !drawable().some(({ columns }) => keys.some(([key]) => (columns[key] || []).some((value) => value != null)));
        if (node.hidden) continue;
        const lines = keys.flatMap(([key, name, scale], dash) =>
          drawable().map((one) => lineOf(one, key, "round", scale || 1, dash, name)));
        charts.lines(chart, lines, "rounds", unit || title.toLowerCase(), { title, zero: true });
      }
    };
  }

  return [
    { key: "overview", title: "Overview", make: overview, rounds: true },
    { key: "training", title: "Training", make: training, rounds: true },
  ];
})();
