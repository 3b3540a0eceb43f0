"use strict";
// Which view is open, of which run, and how it is kept up to date.
(() => {
  const { el, views, data, ask, charts } = Watch;
  const EVERY = 2000;
  const tabs = document.getElementById("tabs");
  const panels = document.getElementById("panels");
  const picker = document.getElementById("picker");
  const chosen = document.getElementById("chosen");
  const message = document.getElementById("message");
  const link = document.getElementById("link");
  const opened = {};
  const state = { view: views[0], run: null, busy: false, again: false };

  for (const view of views) {
    const panel = el("section", { role: "tabpanel", id: `panel-${view.key}`, "aria-labelledby": `tab-${view.key}`, hidden: true });
    const tab = el("button", {
      type: "button", role: "tab", id: `tab-${view.key}`, "aria-controls": panel.id, onclick: () => go(view.key), onkeydown: move,
    }, view.title);
    opened[view.key] = { tab, panel, update: null };
    tabs.append(tab);
    panels.append(panel);
  }

  // Arrow keys between tabs, as in every other row of tabs.
  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const place = views.indexOf(state.view);
    const next = { Home: 0, End: views.length - 1 }[event.key] ?? (step && (place + step + views.length) % views.length);
    if (next === undefined) return;
    event.preventDefault();
    go(views[next].key);
    opened[views[next].key].tab.focus();
  }

  // Whether there are tabs beyond the right edge, for the arrow that shows it.
  function more() {
    tabs.classList.toggle("more", tabs.scrollLeft + tabs.clientWidth < tabs.scrollWidth - 4);
  }

  function go(key, run = state.run) {
    location.hash = Watch.link(key, run);
  }

  function read() {
    const [key, run] = location.hash.slice(1).split("/");
    state.view = views.find((view) => view.key === key) || views[0];
    state.run = run ? decodeURIComponent(run) : state.run;
    for (const view of views) {
      const { tab, panel } = opened[view.key];
      const here = view === state.view;
      tab.setAttribute("aria-selected", String(here));
      tab.tabIndex = here ? 0 : -1;
      panel.hidden = !here;
    }
    const { tab } = opened[state.view.key];
    const { left, right } = tab.getBoundingClientRect();
    if (left < 0 || right > innerWidth - 30) tabs.scrollLeft = tab.offsetLeft - 30;
    more();
    refresh();
  }

  function pick() {
    const all = data.listing.runs;
    const served = state.view.served ? all.filter((one) => one.network) : [];
    const runs = served.length ? served : all;
    const run = runs.find((one) => one.id === state.run) || runs.find((one) => one.active) || runs[0];
    picker.hidden = !state.view.one || !run;
    const key = JSON.stringify(runs.map((one) => [one.id, one.name]));
    if (chosen.dataset.key !== key) {
      chosen.dataset.key = key;
      chosen.replaceChildren(...runs.map((one) => el("option", { value: one.id }, one.name)));
    }
    if (run) {
      chosen.value = run.id;
      document.getElementById("chosen-state").replaceChildren(
        el("span", { class: `badge ${run.state}` }, run.state), ` ${run.note}`);
    }
    return run;
  }

  function describe() {
    const { folders, runs, time } = data.listing;
    document.title = runs.length === 1 ? `${runs[0].name} · semisfl watch` : "semisfl watch";
    message.hidden = runs.length > 0;
    message.textContent = Watch.live
      ? `No run in ${folders.join(", ")} yet. One that begins there appears here by itself.`
      : "No run.";
    link.className = Watch.live ? "link live" : "link";
    link.textContent = Watch.live ? "live" : `as of ${new Date(time * 1000).toISOString().slice(0, 16).replace("T", " ")} UTC`;
  }

  // Only what is new is asked for; a run that was resumed begins anew.
  async function moreRounds() {
    const have = data.listing.runs.map(({ id }) => {
      const held = data.rounds[id];
      return ["have", `${held ? held.epoch : 0}.${held ? held.columns.round.length : 0}.${id}`];
    });
    if (!have.length) return;
    const { runs } = await ask("rounds", have);
    for (const [id, { epoch, first, columns }] of Object.entries(runs)) {
      const held = data.rounds[id];
      if (!held || held.epoch !== epoch || !first) {
        data.rounds[id] = { epoch, columns };
        continue;
      }
      const done = held.columns.round.length;
      for (const key of Object.keys(columns)) {
        (held.columns[key] ||= new Array(done).fill(null)).push(...columns[key]);
      }
    }
  }

  async function refresh() {
    if (state.busy) { state.again = true; return; }
    state.busy = true;
    const { key, make, rounds } = state.view; // another may be chosen meanwhile
    try {
      data.listing = await ask("runs");
      if (rounds) await moreRounds();
      describe();
      const run = pick();
      const view = opened[key];
      if (state.view.key === key) view.panel.hidden = !run;
      if (run) {
        view.update ||= make(view.panel);
        await view.update(run);
      }
      document.body.dataset.shown = run ? `${key}/${run.id}` : key;
    } catch (error) {
      link.className = "link lost";
      link.textContent = `cannot be reached, trying again (${error.message})`;
    } finally {
      state.busy = false;
      if (state.again) { state.again = false; refresh(); }
    }
  }

  chosen.addEventListener("change", () => go(state.view.key, chosen.value));
  window.addEventListener("hashchange", read);
  window.addEventListener("resize", more);
  tabs.addEventListener("scroll", more);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", charts.repaint);
  document.addEventListener("visibilitychange", () => { if (!document.hidden && Watch.live) refresh(); });
  read();
  if (Watch.live) setInterval(() => { if (!document.hidden) refresh(); }, EVERY);
})();
