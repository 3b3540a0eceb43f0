"use strict";
// Views of one run's clients and devices; then all views, in the order of their tabs.
Watch.views = (() => {
  const { el, format, charts, table, ask } = Watch;
  const { card, badge, tiles, fill, signature } = Watch.parts;

  // --- clients --------------------------------------------------------------------------------------

  function clients(panel) {
    const held = el("div", { class: "chart tall" });
    const coverage = el("div", { class: "chart tall" });
    const later = el("p", { class: "about" });
    const list = table({
      caption: "Coverage is the share of a client's images whose pseudo-label is kept. Of a place that was freed, only the rounds since then count.",
      filter: "Find a client", sort: ["client", 1],
      columns: [
        { key: "client", title: "Client", number: true },
        { key: "name", title: "Name", wrap: true, optional: true },
        { key: "images", title: "Images", number: true, optional: true, show: (row) => format.count(row.images) },
        { key: "rounds", title: "Rounds taken part", number: true, show: (row) => format.count(row.rounds) },
        { key: "missed", title: "Did not answer", number: true, show: (row) => format.count(row.missed) },
        { key: "mean", title: "Coverage, mean", number: true, show: (row) => format.share(row.mean) },
        { key: "last", title: "Coverage, last", number: true, show: (row) => format.share(row.last) },
        { key: "last_round", title: "Last round", number: true },
      ],
    });
    const heldCard = card("Images per client", "Images of each class, by their true labels. The server has labels for its images.", held);
    const coverageCard = card("Coverage by client", "Share of pseudo-labels kept, mean over the rounds of a column; empty: not chosen.", coverage, later);
    panel.append(el("div", { class: "stack" }, el("div", { class: "grid" }, heldCard, coverageCard), card("Clients", null, list.node)));
    let before = "";
    return async (run) => {
      const now = signature(run.id);
      if (before === now) return;
      const answer = await ask("clients", { run: run.id });
      before = now;
      const { holdings, coverage: shares } = answer;
      const called = new Map(answer.clients.map((one) => [one.client, one.name]));
      const label = (number) => {
        const name = called.get(number) || String(number);
        return name === "server" ? "server (client)" : name; // the server has a column of its own
      };
      const divided = holdings.clients && holdings.clients.length;
      heldCard.hidden = !divided;
      if (divided) {
        const holders = [holdings.server, ...holdings.clients];
        const names = ["server", ...holdings.clients.map((_, number) => label(number))];
        const grid = holdings.classes.map((_, place) => holders.map((counts) => counts[place] || null));
        const description = `Images by client (${holdings.clients.length}) and class (${holdings.classes.length})`;
        charts.map(held, grid, names, holdings.classes, "client", "class", "images", description);
      }
      coverageCard.hidden = !shares.clients.length && !run.active;
      coverage.hidden = !shares.clients.length;
      later.hidden = !coverage.hidden;
      later.textContent = `The first numbers come when clients have taken part in a round: round ${run.first_clients} at the earliest.`;
      if (shares.clients.length) {
        const grid = shares.shares.map((row) => row.map((share) => (share == null ? null : 100 * share)));
        charts.map(coverage, grid, shares.rounds.map(String), shares.clients.map(label), "round", "client", "%",
          `Coverage by client (${shares.clients.length}) and round (${run.done})`);
      }
      list.update(answer.clients);
    };
  }

  // --- devices --------------------------------------------------------------------------------------

  const SOON = 30; // days before its end in which server and devices warn of a certificate, too

  function devices(panel) {
    const numbers = tiles();
    const none = el("p", { class: "message" }, "This run simulates its clients; there are no devices.");
    const since = (time) => (time ? format.ago(Date.now() / 1000 - Date.parse(time) / 1000) : "–");
    const clock = (time) => (time ? String(time).slice(5).replace("T", " ").replace("Z", "") : "–");
    const days = (until) => (until ? Math.floor((Date.parse(until) - Date.now()) / 864e5) : null);
    const daysLeft = (row) => (row.days == null ? "–" : row.days >= SOON ? format.count(row.days)
      : el("span", { class: "badge WARNING", title: "Renew it: semisfl certs request, then certs sign" }, row.days < 0 ? "expired" : String(row.days)));
    // gRPC writes ipv6:%5B::1%5D:49152; only the brackets are ever written so.
    const address = (peer) => String(peer ?? "–").replace("%5B", "[").replace("%5D", "]");
    const list = table({
      caption: "Enrolled devices, and those that were turned away. Bytes count complete rounds only.", filter: "Find a device", sort: ["client", 1],
      columns: [
        { key: "client", title: "Client", number: true },
        { key: "name", title: "Name", wrap: true },
        { key: "state", title: "State", show: (row) => badge(row.state) },
        { key: "since", title: "Since, UTC", time: true, show: (row) => clock(row.since) },
        { key: "seen", title: "Last seen, UTC", time: true, show: (row) => clock(row.seen) },
        { key: "images", title: "Images", number: true, show: (row) => format.count(row.images) },
        { key: "bytes_up", title: "Up", number: true, show: (row) => format.bytes(row.bytes_up) },
        { key: "bytes_down", title: "Down", number: true, show: (row) => format.bytes(row.bytes_down) },
        { key: "answer_seconds", title: "Answers, s", number: true, optional: true, show: (row) => row.answer_seconds?.toFixed(2) ?? "–" },
        { key: "days", title: "Certificate, days left", number: true, optional: true, show: daysLeft },
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
      const rows = answer.devices.map((row) => ({ ...row, days: days(row.certificate_until) }));
      const count = (state) => rows.filter((row) => row.state === state).length;
      fill(numbers, [
        ["Here now", String(count("here")), `of ${answer.places ?? "?"} places`],
        ["Enrolled", String(rows.filter((row) => row.client != null).length)],
        ["Images on devices", format.count(rows.reduce((sum, row) => sum + (row.images || 0), 0))],
        ["Left out of a round", format.count(answer.counts.left_out || 0)],
        ["Refused", format.count(answer.counts.refused || 0)],
        ["Revoked", format.count(count("revoked"))],
        ["Written", since(answer.time)],
      ]);
      list.update(rows);
      events.update(answer.events);
    };
  }

  return [
    ...Watch.severalRuns,
    { key: "clients", title: "Clients", make: clients, one: true },
    { key: "devices", title: "Devices", make: devices, one: true, served: true },
    { key: "settings", title: "Settings", make: Watch.settings },
    { key: "log", title: "Log", make: Watch.log, one: true },
  ];
})();
