"use strict";
// The views: each makes its elements once, and fills them whenever there is something new.
Watch.views = (() => {
  const { el, words, charts, table, data, ask } = Watch;
  const AXES = {
    round: { title: "rounds", x: (columns) => columns.round.map((round) => round + 1) },
    gigabytes: { title: "GB sent", x: (columns) => columns.bytes_total.map((size) => size / 1e9) },
    seconds: { title: "minutes", x: (columns) => summed(columns.seconds).map((time) => time / 60) },
  };
  const hidden = new Set(); // runs that are not in the charts

  function summed(values) {
    let total = 0;
    return values.map((value) => (total += value || 0));
  }

  const card = (title, about, ...inside) =>
    el("section", { class: "card" }, el("header", {}, el("h2", {}, title)),
      about ? el("p", { class: "about" }, about) : null, ...inside);
  const badge = (state, title) => el("span", { class: `badge ${state}`, title }, state.replace("_", " "));
  const tiles = () => el("dl", { class: "tiles" });

  function fill(node, pairs) {
    node.replaceChildren(...pairs.map(([name, value, more]) => el("div", { class: "tile" },
      el("dt", {}, name), el("dd", {}, value, more ? el("small", {}, ` ${more}`) : null))));
  }

  // Whether there is anything new to draw: rounds, runs, or another width.
  const signature = (...more) => JSON.stringify([
    data.listing.runs.map((run) => [run.id, run.label, (data.rounds[run.id] || {}).epoch, run.done]),
    [...hidden], innerWidth, ...more,
  ]);

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
    const accuracy = card("Test accuracy", null, chart, legend);
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
      charts.lines(chart, lines, AXES[axis].title, "accuracy, %", { title: "Test accuracy" });
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

  // --- clients --------------------------------------------------------------------------------------

  function clients(panel) {
    const held = el("div", { class: "chart tall" });
    const coverage = el("div", { class: "chart tall" });
    const list = table({
      caption: "Coverage is the share of a client's images whose pseudo-label is kept.",
      filter: "Find a client", sort: ["client", 1],
      columns: [
        { key: "client", title: "Client", number: true },
        { key: "name", title: "Name", wrap: true, optional: true },
        { key: "images", title: "Images", number: true, optional: true, show: (row) => words.count(row.images) },
        { key: "rounds", title: "Rounds taken part", number: true, show: (row) => words.count(row.rounds) },
        { key: "missed", title: "Did not answer", number: true, show: (row) => words.count(row.missed) },
        { key: "mean", title: "Coverage, mean", number: true, show: (row) => words.share(row.mean) },
        { key: "last", title: "Coverage, last", number: true, show: (row) => words.share(row.last) },
        { key: "last_round", title: "Last round", number: true },
      ],
    });
    const heldCard = card("Who holds what", "Images of each class, true labels; the server's are those it has labels of.", held);
    const coverageCard = card("Coverage by client", "Share of pseudo-labels kept, mean over the rounds of a column; empty: not chosen.", coverage);
    panel.append(el("div", { class: "stack" }, el("div", { class: "grid" }, heldCard, coverageCard), card("Clients", null, list.node)));
    let before = "";
    return async (run) => {
      const now = signature(run.id);
      if (before === now) return;
      const answer = await ask("clients", { run: run.id });
      before = now;
      const { holdings, coverage: shares } = answer;
      const divided = holdings.clients && holdings.clients.length;
      heldCard.hidden = !divided;
      if (divided) {
        const holders = [holdings.server, ...holdings.clients];
        const names = ["server", ...holdings.clients.map((_, number) => String(number))];
        const grid = holdings.classes.map((_, place) => holders.map((counts) => counts[place] || null));
        const said = `Who holds what: ${holdings.clients.length} clients, ${holdings.classes.length} classes`;
        charts.map(held, grid, names, holdings.classes, "client", "class", "images", said);
      }
      coverageCard.hidden = !shares.clients.length;
      if (shares.clients.length) {
        const grid = shares.shares.map((row) => row.map((share) => (share == null ? null : 100 * share)));
        charts.map(coverage, grid, shares.rounds.map(String), shares.clients.map(String), "round", "client", "%",
          `Coverage of ${shares.clients.length} clients over ${run.done} rounds`);
      }
      list.update(answer.clients);
    };
  }

  // --- devices --------------------------------------------------------------------------------------

  function devices(panel) {
    const numbers = tiles();
    const none = el("p", { class: "message" }, "The clients of this run live in its own process: no device comes or goes.");
    const since = (time) => (time ? words.ago(Date.now() / 1000 - Date.parse(time) / 1000) : "–");
    const clock = (time) => (time ? String(time).slice(5).replace("T", " ").replace("Z", "") : "–");
    // gRPC writes ipv6:%5B::1%5D:49152; only the brackets are ever written so.
    const address = (peer) => String(peer ?? "–").replace("%5B", "[").replace("%5D", "]");
    const list = table({
      caption: "Devices that have a place. Bytes are those of whole rounds.", filter: "Find a device", sort: ["client", 1],
      columns: [
        { key: "client", title: "Client", number: true },
        { key: "name", title: "Name", wrap: true },
        { key: "here", title: "State", show: (row) => badge(row.here) },
        { key: "since", title: "Since, UTC", time: true, show: (row) => clock(row.since) },
        { key: "seen", title: "Last seen, UTC", time: true, show: (row) => clock(row.seen) },
        { key: "images", title: "Images", number: true, show: (row) => words.count(row.images) },
        { key: "bytes_up", title: "Up", number: true, show: (row) => words.bytes(row.bytes_up) },
        { key: "bytes_down", title: "Down", number: true, show: (row) => words.bytes(row.bytes_down) },
        { key: "left_out", title: "Left out", number: true },
        { key: "reason", title: "Why, the last time", wrap: true, show: (row) => row.reason || "–" },
      ],
    });
    const events = table({
      caption: "The latest events, times in UTC.", filter: "Find an event", sort: ["time", -1], page: 25,
      columns: [
        { key: "time", title: "Time", time: true, show: (row) => clock(row.time) },
        { key: "event", title: "Event", show: (row) => badge(row.event) },
        { key: "name", title: "Name", wrap: true },
        { key: "peer", title: "Address", wrap: true, show: (row) => address(row.peer) },
        { key: "reason", title: "Why", wrap: true },
      ],
    });
    const all = el("div", { class: "stack" }, numbers, card("Devices", null, list.node), card("What happened", null, events.node));
    panel.append(none, all);
    return async (run) => {
      none.hidden = run.network;
      all.hidden = !run.network;
      if (!run.network) return;
      const answer = await ask("devices", { run: run.id });
      const rows = answer.devices.map((row) => ({ ...row, here: row.since && answer.running ? "here" : "away" }));
      const here = rows.filter((row) => row.here === "here").length;
      fill(numbers, [
        ["Here now", String(here), `of ${answer.places ?? "?"} places`],
        ["Enrolled", String(rows.length)],
        ["Images on devices", words.count(rows.reduce((sum, row) => sum + (row.images || 0), 0))],
        ["Left out of a round", words.count(answer.counts.left_out || 0)],
        ["Refused at the door", words.count(answer.counts.refused || 0)],
        ["Written", since(answer.time)],
      ]);
      list.update(rows);
      events.update(answer.events);
    };
  }

  // --- settings -------------------------------------------------------------------------------------

  function settings(panel) {
    let onlyDifferences = true;
    let answer = null;
    const place = el("div", {});
    const box = el("input", { type: "checkbox", checked: true, onchange(event) { onlyDifferences = event.target.checked; draw(); } });
    const several = el("label", {}, box, "only what differs between runs");
    panel.append(el("section", { class: "card" }, el("header", {}, el("h2", {}, "Settings"), el("div", { class: "tools" }, several)), place));

    function draw() {
      const runs = data.listing.runs.filter((run) => answer.runs[run.id]);
      const keys = [...new Set(runs.flatMap((run) => Object.keys(answer.runs[run.id])))];
      const of = (run, key) => answer.runs[run.id][key] ?? "none";
      const differs = (key) => new Set(runs.map((run) => of(run, key))).size > 1;
      several.hidden = runs.length < 2;
      const shown = runs.length > 1 && onlyDifferences ? keys.filter(differs) : keys;
      const rows = shown.map((key) => el("tr", {}, el("td", { class: "key" }, key), runs.map((run) =>
        el("td", { class: runs.length > 1 && !onlyDifferences && differs(key) ? "differs" : null }, of(run, key)))));
      const head = el("tr", {}, el("th", { scope: "col" }, "Setting"), runs.map((run) => el("th", { scope: "col" }, run.name)));
      const caption = shown.length ? `${shown.length} ${shown.length === 1 ? "setting" : "settings"}` : "These runs do not differ in any setting.";
      place.replaceChildren(el("p", { class: "about" }, caption), el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Settings" },
        el("table", { "aria-label": "Settings" }, el("thead", {}, head), el("tbody", {}, rows))));
    }

    return async () => {
      const now = await ask("settings");
      if (answer && JSON.stringify(now) === JSON.stringify(answer)) return;
      answer = now;
      draw();
    };
  }

  // --- log ------------------------------------------------------------------------------------------

  function log(panel) {
    const MOST_LINES = 2000;
    let onlyWarnings = false;
    let shown = null;
    const list = el("ol", { class: "log", tabindex: "0", "aria-label": "Log, times in UTC" });
    const box = el("input", { type: "checkbox", onchange(event) { onlyWarnings = event.target.checked; filter(); } });
    const empty = el("p", { class: "about" }, "Nothing was logged, or the log is not here.");
    panel.append(el("section", { class: "card" },
      el("header", {}, el("h2", {}, "Log"), el("div", { class: "tools" }, el("label", {}, box, "only warnings"))), empty, list));

    const level = (text) => (text.match(/^\S+ (WARNING|ERROR|CRITICAL) /) || [])[1] || "";
    const filter = () => {
      for (const item of list.children) item.hidden = onlyWarnings && !item.className;
    };

    return async (run) => {
      const from = shown && shown.run === run.id ? shown.next : -1;
      if (from === -1) list.replaceChildren();
      const answer = await ask("log", { run: run.id, from });
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      const fresh = from === -1 || Watch.live ? answer.lines : [];
      list.append(...fresh.map((text) => el("li", { class: level(text) }, text)));
      while (list.children.length > MOST_LINES) list.firstChild.remove();
      shown = { run: run.id, next: answer.next };
      empty.hidden = list.children.length > 0;
      filter();
      if (atEnd) list.scrollTop = list.scrollHeight;
    };
  }

  return [
    { key: "overview", title: "Overview", make: overview, rounds: true },
    { key: "training", title: "Training", make: training, rounds: true },
    { key: "clients", title: "Clients", make: clients, one: true },
    { key: "devices", title: "Devices", make: devices, one: true },
    { key: "settings", title: "Settings", make: settings },
    { key: "log", title: "Log", make: log, one: true },
  ];
})();
