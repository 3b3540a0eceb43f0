"use strict";
// Elements that the views share.
Watch.parts = (() => {
  const { el, data } = Watch;
  const hidden = new Set(); // runs that are not in the charts

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
    data.listing.runs.map((run) => [run.id, run.colour, run.note, (data.rounds[run.id] || {}).epoch, run.done]),
    [...hidden], innerWidth, ...more,
  ]);

  return { card, badge, tiles, fill, hidden, signature };
})();
