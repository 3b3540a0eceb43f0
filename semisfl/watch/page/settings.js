"use strict";
// The settings of every run: those that differ from the preset first.
Watch.settings = (() => {
  const { el, data, ask } = Watch;

  return function settings(panel) {
    let onlyDifferences = true;
    let wanted = "";
    let answer = null;
    const place = el("div", {});
    const box = el("input", { type: "checkbox", checked: true, onchange(event) { onlyDifferences = event.target.checked; draw(); } });
    const several = el("label", {}, box, "only what differs between runs");
    const search = el("input", {
      type: "search", placeholder: "Find a setting", "aria-label": "Find a setting",
      oninput(event) { wanted = event.target.value.trim().toLowerCase(); draw(); },
    });
    panel.append(el("section", { class: "card" },
      el("header", {}, el("h2", {}, "Settings"), el("div", { class: "tools" }, several, search)), place));

    function draw() {
      const runs = data.listing.runs.filter((run) => answer.runs[run.id]);
      const of = (run, key) => answer.runs[run.id][key] ?? "none";
      const presetOf = (run) => answer.presets[run.id] || { name: "?", changed: {} };
      const differs = (key) => new Set(runs.map((run) => of(run, key))).size > 1;
      several.hidden = runs.length < 2;
      const keys = [...new Set(runs.flatMap((run) => Object.keys(answer.runs[run.id])))]
        .filter((key) => runs.length < 2 || !onlyDifferences || differs(key))
        .filter((key) => !wanted || [key, ...runs.map((run) => of(run, key))].some((text) => text.toLowerCase().includes(wanted)));
      const changed = keys.filter((key) => runs.some((run) => key in presetOf(run).changed));
      const others = keys.filter((key) => !changed.includes(key));

      const cell = (run, key) => {
        const before = presetOf(run).changed[key];
        return el("td", { class: runs.length > 1 && !onlyDifferences && differs(key) ? "differs" : null },
          of(run, key), before === undefined ? null : el("small", { class: "quiet" }, ` preset: ${before}`));
      };
      const part = (title, some) => (some.length ? [
        el("tr", { class: "part" }, el("th", { scope: "rowgroup", colspan: runs.length + 1 }, `${title} (${some.length})`)),
        ...some.map((key) => el("tr", {}, el("td", { class: "key" }, key), runs.map((run) => cell(run, key)))),
      ] : []);
      const head = el("tr", {}, el("th", { scope: "col" }, "Setting"), runs.map((run) =>
        el("th", { scope: "col" }, run.name, el("small", { class: "quiet" }, ` preset ${presetOf(run).name}`))));
      const none = wanted ? `No setting contains "${wanted}".` : "These runs do not differ in any setting.";
      place.replaceChildren(
        el("p", { class: "about", role: "status" }, keys.length ? `${keys.length} ${keys.length === 1 ? "setting" : "settings"}` : none),
        el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Settings" },
          el("table", { "aria-label": "Settings" }, el("thead", {}, head),
            el("tbody", {}, part("Changed from the preset", changed), part("As in the preset", others)))));
    }

    return async () => {
      const now = await ask("settings");
      if (answer && JSON.stringify(now) === JSON.stringify(answer)) return;
      answer = now;
      draw();
    };
  };
})();
