"use strict";
// The log of one run, followed, with a filter.
Watch.log = (() => {
  const { el, ask } = Watch;
  const MOST_LINES = 2000;

  return function log(panel) {
    let onlyWarnings = false;
    let wanted = "";
    let shown = null;
    const list = el("ol", { class: "log", tabindex: "0", "aria-label": "Log, times in UTC" });
    const box = el("input", { type: "checkbox", onchange(event) { onlyWarnings = event.target.checked; filter(); } });
    const search = el("input", {
      type: "search", placeholder: "Find in the log", "aria-label": "Find in the log",
      oninput(event) { wanted = event.target.value.trim().toLowerCase(); filter(); },
    });
    const about = el("p", { class: "about", role: "status" });
    panel.append(el("section", { class: "card" }, el("header", {}, el("h2", {}, "Log"),
      el("div", { class: "tools" }, el("label", {}, box, "only warnings"), search)), about, list));

    const level = (text) => (text.match(/^\S+ (WARNING|ERROR|CRITICAL) /) || [])[1] || "";

    function filter() {
      let kept = 0;
      for (const item of list.children) {
        item.hidden = (onlyWarnings && !item.className) || !item.textContent.toLowerCase().includes(wanted);
        kept += !item.hidden;
      }
      const all = list.children.length;
      about.textContent = !all ? "There is no log, or it is empty." : kept < all ? `${kept} of the last ${all} lines` : "";
    }

    return async (run) => {
      const from = shown && shown.run === run.id ? shown.next : -1;
      if (from === -1) list.replaceChildren();
      const answer = await ask("log", { run: run.id, from });
      const atEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
      const fresh = from === -1 || Watch.live ? answer.lines : [];
      list.append(...fresh.map((text) => el("li", { class: level(text) }, text)));
      while (list.children.length > MOST_LINES) list.firstChild.remove();
      shown = { run: run.id, next: answer.next };
      filter();
      if (atEnd) list.scrollTop = list.scrollHeight;
    };
  };
})();
