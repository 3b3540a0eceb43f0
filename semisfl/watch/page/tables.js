"use strict";
// A table that is sorted, filtered and paged, so that a thousand rows are as quick as ten.
Watch.table = (() => {
  const { el } = Watch;
  const PAGE = 50;

  // columns: [{key, title, number, wrap, show(row), sort(row), optional, wide}]; an optional one is left out
  // where no row has it. With ``cards`` a row is a card on a narrow screen, without its wide columns.
  return function table({ columns, caption, filter, sort, cards = false, page = PAGE }) {
    const state = { rows: [], sort: sort || [columns[0].key, 1], page: 0, filter: "" };
    const heads = columns.map((column) => el("button", { type: "button", onclick: () => by(column) }, column.title));
    const heading = columns.map((column, place) =>
      el("th", { scope: "col", class: column.number ? "number" : null }, heads[place]));
    const body = el("tbody");
    const status = el("span", { role: "status" });
    const back = el("button", { type: "button", onclick: () => turn(-1) }, "Back");
    const next = el("button", { type: "button", onclick: () => turn(1) }, "Next");
    const pager = el("div", { class: "pager" }, back, status, next);
    const search = filter && el("input", {
      type: "search", placeholder: filter, "aria-label": filter,
      oninput: (event) => { state.filter = event.target.value.toLowerCase(); state.page = 0; draw(); },
    });
    const node = el("div", {},
      el("p", { class: "about" }, caption),
      filter ? el("div", { class: "tools" }, search) : null,
      el("div", { class: cards ? "table cards" : "table", tabindex: "0", role: "region", "aria-label": caption },
        el("table", { "aria-label": caption }, el("thead", {}, el("tr", {}, heading)), body)),
      pager);

    function by(column) {
      const down = state.sort[0] === column.key ? -state.sort[1] : column.number ? -1 : 1;
      state.sort = [column.key, down];
      state.page = 0;
      draw();
    }

    function turn(step) {
      state.page += step;
      draw();
    }

    const value = (column, row) => (column.sort ? column.sort(row) : row[column.key]);

    function draw() {
      const [key, direction] = state.sort;
      const column = columns.find((one) => one.key === key);
      const kept = state.rows.filter((row) => !state.filter || columns.some((one) =>
        String(value(one, row) ?? "").toLowerCase().includes(state.filter)));
      kept.sort((one, other) => {
        const [a, b] = [value(column, one), value(column, other)];
        if (a == null || b == null) return (a == null) - (b == null);
        return direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b)));
      });
      const pages = Math.max(1, Math.ceil(kept.length / page));
      state.page = Math.min(Math.max(0, state.page), pages - 1);
      const first = state.page * page;
      const shown = kept.slice(first, first + page);
      const used = columns.filter((one) => !one.optional || state.rows.some((row) => row[one.key] != null));
      body.replaceChildren(...shown.map((row) => el("tr", {}, used.map((one) =>
        el("td", { class: [one.number ? "number" : one.wrap ? "wrap" : one.time ? "time" : "", one.wide ? "wide" : ""].join(" "), "data-title": one.title },
          one.show ? one.show(row) : String(row[one.key] ?? "–"))))));
      heading.forEach((cell, place) => {
        cell.hidden = !used.includes(columns[place]);
        const sorted = columns[place].key === key;
        cell.setAttribute("aria-sort", sorted ? (direction > 0 ? "ascending" : "descending") : "none");
      });
      pager.hidden = kept.length <= page && !state.filter;
      status.textContent = kept.length
        ? `${first + 1}–${first + shown.length} of ${kept.length}` : "nothing fits";
      back.disabled = state.page === 0;
      next.disabled = state.page === pages - 1;
    }

    return { node, update(rows) { state.rows = rows; draw(); } };
  };
})();
