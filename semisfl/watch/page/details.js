"use strict";
// Views of one run, and of settings; then all views, in the order of their tabs.
Watch.views = (() => {
  const { el, words, charts, table, data, ask } = Watch;
  const { card, badge, tiles, fill, signature } = Watch.parts;

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
    const heldCard = card("Images per client", "Images of each class, by their true labels. The server has labels for its images.", held);
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
        const said = `Images per client: ${holdings.clients.length} clients, ${holdings.classes.length} classes`;
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
    const none = el("p", { class: "message" }, "This run simulates its clients; there are no devices.");
    const since = (time) => (time ? words.ago(Date.now() / 1000 - Date.parse(time) / 1000) : "–");
    const clock = (time) => (time ? String(time).slice(5).replace("T", " ").replace("Z", "") : "–");
    // gRPC writes ipv6:%5B::1%5D:49152; only the brackets are ever written so.
    const address = (peer) => String(peer ?? "–").replace("%5B", "[").replace("%5D", "]");
    const list = table({
      caption: "Enrolled devices. Bytes count complete rounds only.", filter: "Find a device", sort: ["client", 1],
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
        { key: "reason", title: "Last reason", wrap: true, show: (row) => row.reason || "–" },
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
    const all = el("div", { class: "stack" }, numbers, card("Devices", null, list.node), card("Events", null, events.node));
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
        ["Refused", words.count(answer.counts.refused || 0)],
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
    const empty = el("p", { class: "about" }, "There is no log, or it is empty.");
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
    ...Watch.severalRuns,
    { key: "clients", title: "Clients", make: clients, one: true },
    { key: "devices", title: "Devices", make: devices, one: true },
    { key: "settings", title: "Settings", make: settings },
    { key: "log", title: "Log", make: log, one: true },
  ];
})();
